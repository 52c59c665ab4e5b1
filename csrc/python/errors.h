/* Converts an error value to a Python exception. */
#ifndef TMS_PYTHON_ERRORS_H
#define TMS_PYTHON_ERRORS_H

#include <Python.h>

#include "include/tms.h"

/* Sets the exception that torch_memory_saver.errors makes for `error`; always returns NULL, so that a function can write
 * `return tms_py_raise(&error)`. Needs the GIL, with no lock of the library held, because it imports and calls Python code.
 * If that module fails, sets a RuntimeError with the same message, caused by that failure. */
PyObject *tms_py_raise(const tms_error_t *error);

#endif
