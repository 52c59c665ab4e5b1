/* Allocations, their pause and resume, and the settings that hold for all of them. */
#include "convert.h"
#include "errors.h"
#include "functions.h"
#include "module.h"
#include "status.h"

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

typedef tms_status_t (*transition_t)(const tms_selection_t *selection, tms_report_t *report, tms_error_t *error);

/* While a call runs, the thread state that it has put down to let other threads run. */
typedef struct interruption {
    PyThreadState *thread;
} interruption_t;

/* Runs the handlers of the signals that have come. Not 0: one of them raised, and the exception is set. Asked on the thread
 * of the call, with nothing of ours locked, so that a handler may do what it likes, other than pause and resume. */
static int32_t check_signals(void *context) {
    interruption_t *interruption = context;
    int raised;

    PyEval_RestoreThread(interruption->thread);
    raised = PyErr_CheckSignals();
    interruption->thread = PyEval_SaveThread();
    return raised != 0;
}

/* Takes the selection's array of tags. */
static PyObject *run_transition(transition_t transition, const tms_selection_t *given, bool interruptible) {
    tms_selection_t selection = *given;
    interruption_t interruption;
    tms_report_t report;
    tms_status_t status;
    tms_error_t error;

    if (interruptible) {
        selection.interrupted = check_signals;
        selection.interrupt_context = &interruption;
    }
    tms_error_clear(&error);
    interruption.thread = PyEval_SaveThread();
    status = transition(&selection, &report, &error);
    PyEval_RestoreThread(interruption.thread);
    PyMem_Free((void *)selection.tags);
    if (PyErr_Occurred()) return NULL; /* a signal handler's; the call stopped for it */
    return status == TMS_OK ? tms_py_report(&report) : tms_py_raise(&error);
}

PyObject *tms_py_pause(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"pause", 2, 3, {"tags", "stream", "interruptible"}};
    tms_selection_t selection = {0};
    bool interruptible = false;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_stream(&call, 1, &selection) ||
        !tms_py_get_bool(&call, 2, &interruptible) || !tms_py_get_tags(&call, 0, &selection))
        return NULL;
    return run_transition(tms_py_api(module)->pause, &selection, interruptible);
}

PyObject *tms_py_resume(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {
        "resume", 2, 5, {"tags", "stream", "interruptible", "timeout", "exclusive"}};
    tms_selection_t selection = {0};
    bool interruptible = false, exclusive = false;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_stream(&call, 1, &selection) ||
        !tms_py_get_bool(&call, 2, &interruptible) || !tms_py_get_seconds(&call, 3, &selection.timeout_seconds) ||
        !tms_py_get_bool(&call, 4, &exclusive) || !tms_py_get_tags(&call, 0, &selection))
        return NULL;
    selection.exclusive = exclusive;
    return run_transition(tms_py_api(module)->resume, &selection, interruptible);
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

PyObject *tms_py_set_disk_directory(PyObject *module, PyObject *const *arguments, Py_ssize_t positional,
                                    PyObject *keywords) {
    static const tms_py_signature_t signature = {"set_disk_directory", 1, 1, {"path"}};
    const tms_api_t *api = tms_py_api(module);
    PyObject *path = NULL; /* bytes in the file system's encoding */
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
