#include "errors.h"

#include <string.h>

#include "base/status.h"
#include "convert.h"

/* Returns the message of the error, or the text of its status if it has none. */
static PyObject *message_of(const tms_error_t *error) {
    return tms_py_text(error->message[0] ? error->message : tms_status_text(error->status));
}

/* errors.make_error(status, message, operation, call, result_name, driver_result, os_error, device, bytes, address, tag) */
static PyObject *make_exception(const tms_error_t *error) {
    PyObject *exception = NULL;
    PyObject *module = PyImport_ImportModule("torch_memory_saver.errors");

    if (!module) return NULL;
    exception =
        PyObject_CallMethod(module, "make_error", "sNNNNiiiKKN", tms_status_name(error->status), message_of(error),
                            tms_py_text(error->operation), tms_py_text(error->call), tms_py_text(error->result_name),
                            (int)error->driver_result, (int)error->os_error, (int)error->device,
                            (unsigned long long)error->bytes, (unsigned long long)error->address, tms_py_text(error->tag));
    Py_DECREF(module);
    if (exception && !PyExceptionInstance_Check(exception)) {
        PyErr_Format(PyExc_TypeError, "torch_memory_saver.errors.make_error returned %R, not an exception", exception);
        Py_CLEAR(exception);
    }
    return exception;
}

/* Makes a RuntimeError with the message, caused by the current exception. */
static PyObject *make_plain_exception(const tms_error_t *error) {
    PyObject *type, *cause, *traceback;
    PyObject *message, *exception = NULL;

    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    message = message_of(error);
    if (message) exception = PyObject_CallFunctionObjArgs(PyExc_RuntimeError, message, NULL);
    Py_XDECREF(message);
    if (exception && cause) {
        if (traceback) PyException_SetTraceback(cause, traceback);
        PyException_SetCause(exception, cause); /* takes the reference */
        cause = NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(cause);
    Py_XDECREF(traceback);
    return exception;
}

PyObject *tms_py_raise(const tms_error_t *error) {
    PyObject *exception = make_exception(error);

    if (!exception) exception = make_plain_exception(error);
    if (exception) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
        Py_DECREF(exception);
    }
    return NULL;
}
