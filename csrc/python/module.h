/* What the extension keeps for each interpreter that imports it, and how the functions reach it. */
#ifndef TMS_PYTHON_MODULE_H
#define TMS_PYTHON_MODULE_H

#include <Python.h>

#include "tms.h"

typedef struct tms_py_state {
    const tms_api_t *api;       /* of the library that holds the process's state; never changes after the import */
    PyObject *host_buffer_type; /* HostBuffer */
    PyObject *pending_type;     /* Pending */
} tms_py_state_t;

static inline const tms_api_t *tms_py_api(PyObject *module) { return ((tms_py_state_t *)PyModule_GetState(module))->api; }

#endif
