/* Which library of the process holds its one state: the preload library if it is loaded, otherwise this extension. */
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

/* Needs the GIL. False with ImportError set where a library that speaks another version of the table is loaded: a second
 * state beside its own would break every promise that this package makes, so the import must fail. */
bool tms_py_library_find(tms_py_library_t *library);

#endif
