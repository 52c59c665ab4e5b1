/* The directories in which the package keeps files (base/private_directory.h), and the key of the shared store. Needs no
 * state. A call may wait for the file system. */
#include <errno.h>
#include <unistd.h>

#include "backup/shared/key.h"
#include "base/private_directory.h"
#include "convert.h"
#include "errors.h"
#include "functions.h"

static PyObject *raise_unusable(const tms_directory_t *found, const tms_directory_failure_t *failure) {
    PyObject *path = PyUnicode_DecodeFSDefault(found->path);
    /* "Operation not permitted" alone does not say which check failed. */
    PyObject *text = failure->os_error == EPERM ? PyUnicode_FromFormat("%s failed", failure->call)
                                                : PyUnicode_DecodeLocale(TMS_OS_TEXT(failure->os_error), NULL);
    PyObject *error = path && text ? PyObject_CallFunction(PyExc_OSError, "iOO", failure->os_error, text, path) : NULL;
    if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    Py_XDECREF(text);
    Py_XDECREF(path);
    return NULL;
}

PyObject *tms_py_open_directory(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"open_directory", 1, 4, {"path", "mode", "exact", "own"}};
    tms_directory_choice_t choice = {.parent = "", .walk = {.parents = true}};
    tms_directory_failure_t failure;
    tms_directory_t found;
    PyObject *path = NULL, *result = NULL;
    bool opened;
    int32_t mode = 0;
    tms_py_call_t call;

    (void)module;
    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 1, &mode) ||
        !tms_py_get_bool(&call, 2, &choice.exact) || (call.values[3] && !tms_py_get_tag(&call, 3, &choice.own)) ||
        !PyUnicode_FSConverter(call.values[0], &path))
        return NULL;
    choice.configured = PyBytes_AsString(path);
    choice.walk.mode = (mode_t)mode;
    Py_BEGIN_ALLOW_THREADS;
    opened = tms_directory_open(&choice, &found, &failure);
    Py_END_ALLOW_THREADS;
    if (opened) {
        PyObject *name = PyUnicode_DecodeFSDefault(found.path);
        result = name ? Py_BuildValue("(iNs)", found.fd, name, found.shared ? found.shared : "") : NULL;
        if (!result) close(found.fd);
    } else {
        raise_unusable(&found, &failure);
    }
    Py_DECREF(path);
    return result;
}

PyObject *tms_py_check_store_key(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"check_store_key", 2, 2, {"descriptor", "path"}};
    static const tms_error_context_t context = {.operation = "", .device = TMS_NO_DEVICE};
    tms_status_t status;
    tms_error_t error;
    tms_py_call_t call;
    tms_shared_key_t *key;
    PyObject *path = NULL;
    bool found;
    int32_t descriptor = 0;

    (void)module;
    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &descriptor) ||
        !PyUnicode_FSConverter(call.values[1], &path))
        return NULL;
    key = PyMem_Malloc(sizeof(*key));
    if (!key) {
        Py_DECREF(path);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS;
    status = tms_shared_key_read(descriptor, PyBytes_AsString(path), key, &found, &context, &error);
    Py_END_ALLOW_THREADS;
    PyMem_Free(key);
    Py_DECREF(path);
    if (status != TMS_OK) return tms_py_raise(&error);
    Py_RETURN_NONE;
}
