/* The one place where an error value becomes a Python exception. */
#ifndef TMS_PYTHON_ERRORS_H
#define TMS_PYTHON_ERRORS_H

#include <Python.h>

#include "include/tms.h"

/* Sets the exception that torch_memory_saver.errors makes for `error`; always returns NULL, so that a function can write
 * `return tms_py_raise(&error)`. Needs the GIL, and no lock of ours, because it imports and calls Python code. Where that
 * module cannot be used, a RuntimeError with the same message is set, caused by what went wrong there. */
PyObject *tms_py_raise(const tms_error_t *error);

#endif
