/* Pending: a resume in the background. Like HostBuffer it has its own pointer to the function table. The waiting functions
 * release the GIL, and run signal handlers on the main thread. A handler that raises ends the wait, not the resume. */
#include "base/clock.h"
#include "base/status.h"
#include "convert.h"
#include "errors.h"
#include "functions.h"
#include "module_state.h"
#include "rows.h"
#include "selection.h"

/* A longer wait has no deadline. */
#define MAX_SECONDS 1e9

typedef struct pending {
    PyObject_HEAD const tms_api_t *api;
    tms_pending_t *pending; /* the handle; released with this object */
} pending_t;

static void deallocate(PyObject *self) {
    pending_t *object = (pending_t *)self;
    PyTypeObject *type = Py_TYPE(self);

    /* The last release destroys events, which may block in the driver. */
    Py_BEGIN_ALLOW_THREADS;
    object->api->pending_release(object->pending);
    Py_END_ALLOW_THREADS;
    PyObject_Free(self);
    Py_DECREF(type); /* an object of a heap type holds a reference to it */
}

PyObject *tms_py_pending_type(PyObject *module) {
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, deallocate}, {Py_tp_doc, "A resume in the background. Made by resume_begin() only."}, {0, NULL}};
    static PyType_Spec spec = {.name = "torch_memory_saver._core.Pending",
                               .basicsize = sizeof(pending_t),
                               .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               .slots = slots};

    return PyType_FromModuleAndSpec(module, &spec, NULL);
}

PyObject *tms_py_resume_begin(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    tms_py_state_t *state = PyModule_GetState(module);
    tms_selection_t selection = {0};
    tms_py_callers_t callers = {0}; /* not used: the caller does not wait */
    tms_status_t status;
    tms_error_t error;
    pending_t *object;

    if (!tms_py_get_resume("resume_begin", arguments, positional, keywords, &selection, &callers)) return NULL;
    object = PyObject_New(pending_t, (PyTypeObject *)state->pending_type);
    if (!object) {
        PyMem_Free((void *)selection.tags);
        return NULL;
    }
    object->api = state->api;
    object->pending = NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = state->api->resume_begin(&selection, &object->pending, &error);
    Py_END_ALLOW_THREADS;
    PyMem_Free((void *)selection.tags);
    if (status == TMS_OK) return (PyObject *)object;
    Py_DECREF(object);
    return tms_py_raise(&error);
}

static pending_t *get_pending(PyObject *module, const tms_py_call_t *call) {
    tms_py_state_t *state = PyModule_GetState(module);
    PyObject *given = call->values[0];

    if (PyObject_TypeCheck(given, (PyTypeObject *)state->pending_type)) return (pending_t *)given;
    PyErr_Format(PyExc_TypeError, "%s() takes the result of resume_begin(), not %R", call->signature->function, given);
    return NULL;
}

PyObject *tms_py_pending_done(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"pending_done", 1, 1, {"pending"}};
    tms_py_call_t call;
    pending_t *object;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !(object = get_pending(module, &call)))
        return NULL;
    return PyBool_FromLong(object->api->pending_done(object->pending));
}

/* A wait that has released the GIL: the saved thread state, and the end of the wait on tms_clock_nanoseconds. */
typedef struct waiting {
    PyThreadState *thread;
    bool interruptible;
    uint64_t deadline;
} waiting_t;

/* `interrupted` of a wait: not 0 if a signal handler has raised; the exception is set then. */
static int32_t check_signals(void *context) {
    waiting_t *waiting = context;
    int raised;

    PyEval_RestoreThread(waiting->thread);
    raised = PyErr_CheckSignals();
    waiting->thread = PyEval_SaveThread();
    return raised != 0;
}

/* `interrupted` of a wait with a deadline: does what check_signals does, and returns a value other than 0 after the
 * deadline, without an exception. */
static int32_t check_deadline(void *context) {
    waiting_t *waiting = context;
    return (waiting->interruptible && check_signals(context)) || tms_clock_nanoseconds() >= waiting->deadline;
}

PyObject *tms_py_pending_await(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"pending_await", 2, 3, {"pending", "seconds", "interruptible"}};
    waiting_t waiting = {.interruptible = false};
    double seconds;
    tms_status_t status;
    tms_error_t error;
    tms_py_call_t call;
    pending_t *object;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !(object = get_pending(module, &call)) ||
        !tms_py_get_seconds(&call, 1, &seconds) || !tms_py_get_bool(&call, 2, &waiting.interruptible))
        return NULL;
    tms_error_clear(&error);
    waiting.deadline = seconds < MAX_SECONDS ? tms_clock_nanoseconds() + (uint64_t)(seconds * 1e9) : UINT64_MAX;
    waiting.thread = PyEval_SaveThread();
    status = object->api->pending_await(object->pending, check_deadline, &waiting, &error);
    PyEval_RestoreThread(waiting.thread);
    if (PyErr_Occurred()) return NULL;
    if (status != TMS_OK && status != TMS_INTERRUPTED) return tms_py_raise(&error);
    return PyBool_FromLong(status == TMS_OK);
}

PyObject *tms_py_pending_wait(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"pending_wait", 1, 2, {"pending", "interruptible"}};
    bool interruptible = false;
    tms_report_t report;
    tms_status_t status;
    tms_error_t error;
    tms_py_call_t call;
    waiting_t waiting;
    pending_t *object;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !(object = get_pending(module, &call)) ||
        !tms_py_get_bool(&call, 1, &interruptible))
        return NULL;
    tms_error_clear(&error);
    waiting.thread = PyEval_SaveThread();
    status = object->api->pending_wait(object->pending, interruptible ? check_signals : NULL, &waiting, &report, &error);
    PyEval_RestoreThread(waiting.thread);
    if (PyErr_Occurred()) return NULL;
    return status == TMS_OK ? tms_py_report(module, &report) : tms_py_raise(&error);
}

PyObject *tms_py_pending_wait_stream(PyObject *module, PyObject *const *arguments, Py_ssize_t positional,
                                     PyObject *keywords) {
    static const tms_py_signature_t signature = {"pending_wait_stream", 2, 3, {"pending", "stream", "interruptible"}};
    bool interruptible = false;
    tms_status_t status;
    tms_error_t error;
    tms_py_call_t call;
    waiting_t waiting;
    pending_t *object;
    uint64_t stream;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !(object = get_pending(module, &call)) ||
        !tms_py_get_u64(&call, 1, &stream) || !tms_py_get_bool(&call, 2, &interruptible))
        return NULL;
    tms_error_clear(&error);
    waiting.thread = PyEval_SaveThread();
    status = object->api->pending_wait_stream(object->pending, (void *)(uintptr_t)stream,
                                              interruptible ? check_signals : NULL, &waiting, &error);
    PyEval_RestoreThread(waiting.thread);
    if (PyErr_Occurred()) return NULL;
    if (status != TMS_OK) return tms_py_raise(&error);
    Py_RETURN_NONE;
}
