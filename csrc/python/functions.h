/* The bodies of the module's methods (tms_api.def). Each fetches its arguments, calls the function table (without the GIL if
 * the call may wait), and returns a result or raises. Called with the GIL held, on any thread. */
#ifndef TMS_PYTHON_FUNCTIONS_H
#define TMS_PYTHON_FUNCTIONS_H

#include <Python.h>

#define TMS_PY_TAKES(name)                                                                                                  \
    tms_py_##name(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords)
#define TMS_PY_BARE(name)                                            tms_py_##name(PyObject *module, PyObject *unused)
#define TMS_PYTHON_FUNCTION(name, calling, signature, documentation) PyObject *TMS_PY_##calling(name);
#include "include/tms_api.def"
#undef TMS_PY_TAKES
#undef TMS_PY_BARE

/* Each returns a new reference to a type, or NULL with an exception set. */
PyObject *tms_py_host_buffer_type(PyObject *module);
PyObject *tms_py_pending_type(PyObject *module);
PyObject *tms_py_scope_type(PyObject *module);

#endif
