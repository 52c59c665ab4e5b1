/* Finds the library that holds the process's one state: the preload library if it is loaded, otherwise this extension. */
#ifndef TMS_PYTHON_LIBRARY_H
#define TMS_PYTHON_LIBRARY_H

#include <Python.h>
#include <stdbool.h>

#include "include/tms.h"

typedef struct tms_py_library {
    const tms_api_t *api;
    PyObject *path; /* str, absolute; a new reference */
    bool preloaded; /* not this extension */
} tms_py_library_t;

/* Needs the GIL. False with ImportError set if a library with another interface is loaded: there must be only one
 * state in a process, so the import fails. */
bool tms_py_library_find(tms_py_library_t *library);

#endif
