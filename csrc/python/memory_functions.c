/* Functions for allocations, and for the settings of the process. */
#include "base/status.h"
#include "convert.h"
#include "errors.h"
#include "functions.h"
#include "module_state.h"

PyObject *tms_py_allocate(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"allocate", 1, 2, {"size", "device"}};
    const tms_api_t *api = tms_py_api(module);
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;
    uint64_t bytes, address = 0;
    int32_t device = TMS_NO_DEVICE;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &bytes) ||
        !tms_py_get_i32(&call, 1, &device))
        return NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->allocate(bytes, device, &address, &error);
    Py_END_ALLOW_THREADS;
    return status == TMS_OK ? PyLong_FromUnsignedLongLong(address) : tms_py_raise(&error);
}

PyObject *tms_py_free(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"free", 1, 1, {"address"}};
    const tms_api_t *api = tms_py_api(module);
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;
    uint64_t address;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &address)) return NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->free(address, &error);
    Py_END_ALLOW_THREADS;
    if (status != TMS_OK && status != TMS_NOT_MANAGED) return tms_py_raise(&error);
    return PyBool_FromLong(status == TMS_OK);
}

PyObject *tms_py_set_memory_margin(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"set_memory_margin", 1, 1, {"size"}};
    tms_py_call_t call;
    uint64_t bytes;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &bytes)) return NULL;
    tms_py_api(module)->set_memory_margin(bytes);
    Py_RETURN_NONE;
}

PyObject *tms_py_get_memory_margin(PyObject *module, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(tms_py_api(module)->get_memory_margin());
}

PyObject *tms_py_set_retain_backup(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"set_retain_backup", 1, 1, {"retain"}};
    tms_py_call_t call;
    bool retain;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_bool(&call, 0, &retain)) return NULL;
    tms_py_api(module)->set_retain_backup(retain);
    Py_RETURN_NONE;
}

PyObject *tms_py_get_retain_backup(PyObject *module, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(tms_py_api(module)->get_retain_backup());
}

PyObject *tms_py_set_guard(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"set_guard", 1, 1, {"on"}};
    tms_py_call_t call;
    bool on;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_bool(&call, 0, &on)) return NULL;
    tms_py_api(module)->set_guard(on);
    Py_RETURN_NONE;
}

PyObject *tms_py_get_guard(PyObject *module, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(tms_py_api(module)->get_guard());
}

PyObject *tms_py_get_disabled(PyObject *module, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(tms_py_api(module)->get_disabled());
}

PyObject *tms_py_set_disk_directory(PyObject *module, PyObject *const *arguments, Py_ssize_t positional,
                                    PyObject *keywords) {
    static const tms_py_signature_t signature = {"set_disk_directory", 1, 1, {"path"}};
    const tms_api_t *api = tms_py_api(module);
    PyObject *path = NULL; /* a bytes object in the file system's encoding */
    const char *text;
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !PyUnicode_FSConverter(call.values[0], &path))
        return NULL;
    text = PyBytes_AsString(path);
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->set_disk_directory(text, &error);
    Py_END_ALLOW_THREADS;
    Py_DECREF(path);
    if (status != TMS_OK) return tms_py_raise(&error);
    Py_RETURN_NONE;
}

/* Releases the GIL, because the reservation reads limits from files. */
PyObject *tms_py_reserve_host_memory(PyObject *module, PyObject *const *arguments, Py_ssize_t positional,
                                     PyObject *keywords) {
    static const tms_py_signature_t signature = {"reserve_host_memory", 1, 2, {"size", "device"}};
    const tms_api_t *api = tms_py_api(module);
    int32_t device = TMS_NO_DEVICE;
    uint64_t bytes;
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &bytes) ||
        !tms_py_get_i32(&call, 1, &device))
        return NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->reserve_host_memory(bytes, device, &error);
    Py_END_ALLOW_THREADS;
    if (status != TMS_OK) return tms_py_raise(&error);
    Py_RETURN_NONE;
}

PyObject *tms_py_release_host_memory(PyObject *module, PyObject *unused) {
    (void)unused;
    tms_py_api(module)->release_host_memory();
    Py_RETURN_NONE;
}

PyObject *tms_py_set_host_policy(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"set_host_policy", 1, 1, {"policy"}};
    tms_py_call_t call;
    tms_error_t error;
    int32_t policy;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &policy)) return NULL;
    tms_error_clear(&error);
    if (tms_py_api(module)->set_host_policy(policy, &error) != TMS_OK) return tms_py_raise(&error);
    Py_RETURN_NONE;
}

PyObject *tms_py_get_host_policy(PyObject *module, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(tms_py_api(module)->get_host_policy());
}

PyObject *tms_py_close(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);

    (void)unused;
    Py_BEGIN_ALLOW_THREADS; /* close waits for driver calls in flight */
    api->close();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
