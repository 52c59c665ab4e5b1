/* The arguments of pause and resume: fetched by the rows of include/tms_selection.h, and the rows as Python reads them.
 * Every function needs the GIL. */
#ifndef TMS_PYTHON_SELECTION_H
#define TMS_PYTHON_SELECTION_H

#include "convert.h"

/* The callers' objects that a call uses while it runs. All are borrowed, and NULL if they are not given. */
typedef struct tms_py_callers {
    bool signals; /* Python's signal handlers run while the call waits */
    PyObject *find_live, *progress;
} tms_py_callers_t;

/* Each fetches the arguments of a function, whose name messages have, into a selection that is zeroed. Its tags are an array
 * that the caller frees with PyMem_Free. False: an exception is set, and there is nothing to free. */
bool tms_py_get_pause(const char *function, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords,
                      tms_selection_t *selection, tms_py_callers_t *callers);
bool tms_py_get_resume(const char *function, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords,
                       tms_selection_t *selection, tms_py_callers_t *callers);

/* Adds PAUSE_OPTIONS and RESUME_OPTIONS to the module. Returns -1 with an exception set if it fails. */
int tms_py_add_options(PyObject *module);

#endif
