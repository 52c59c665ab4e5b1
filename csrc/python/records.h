/* Managed allocations as dicts of plain values, which json.dumps() takes: snapshot(). Every function needs the GIL. */
#ifndef TMS_PYTHON_RECORDS_H
#define TMS_PYTHON_RECORDS_H

#include <Python.h>

#include "include/tms.h"

/* A list with a dict for each row: see segment_records in _core.pyi. `now`: seconds of CLOCK_MONOTONIC. A new reference, or
 * NULL with an exception set. */
PyObject *tms_py_records(const tms_segment_info_t *rows, size_t count, double now);

/* The names of the states by their numbers, as a tuple. Likewise. */
PyObject *tms_py_state_names(void);

#endif
