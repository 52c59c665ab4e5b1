/* The extension's state for each interpreter that imports it. The module owns it. Used with the GIL held. */
#ifndef TMS_PYTHON_MODULE_STATE_H
#define TMS_PYTHON_MODULE_STATE_H

#include <Python.h>

#include "include/tms.h"

/* The struct sequences (rows.h). */
typedef enum tms_py_row {
    TMS_PY_SEGMENT,
    TMS_PY_USAGE,
    TMS_PY_EXPORT,
    TMS_PY_REPORT,
    TMS_PY_TAG_INFO,
    TMS_PY_DEVICE_MEMORY,
    TMS_PY_DEVICE_INFO,
    TMS_PY_REGION_SETTINGS,
    TMS_PY_EVENT,
    TMS_PY_EVENT_LEVEL,
    TMS_PY_EVENTS_COPY,
    TMS_PY_LIBRARY,
    TMS_PY_ROWS
} tms_py_row_t;

/* The names of methods that C code calls (scope.c). */
typedef enum tms_py_name {
    TMS_PY_OPEN,
    TMS_PY_ENTER,
    TMS_PY_CHOOSE,
    TMS_PY_LEAVE,
    TMS_PY_LEFT,
    TMS_PY_DUNDER_ENTER,
    TMS_PY_DUNDER_EXIT,
    TMS_PY_NAMES
} tms_py_name_t;

typedef struct tms_py_state {
    const tms_api_t *api;       /* of the library that holds the process's state; never changes after the import */
    PyObject *host_buffer_type; /* HostBuffer */
    PyObject *pending_type;     /* Pending */
    PyObject *names[TMS_PY_NAMES];
    PyTypeObject *rows[TMS_PY_ROWS];
} tms_py_state_t;

static inline const tms_api_t *tms_py_api(PyObject *module) { return ((tms_py_state_t *)PyModule_GetState(module))->api; }

#endif
