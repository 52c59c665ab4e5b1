/* Copies of the core's tables. Called with the GIL held, which is released while the core writes the rows. */
#ifndef TMS_PYTHON_COPIES_H
#define TMS_PYTHON_COPIES_H

#include <Python.h>

#include "include/tms.h"

/* A function that writes up to `capacity` rows and returns how many there are. */
typedef size_t (*tms_py_row_source_t)(const void *context, void *rows, size_t capacity);

/* Returns all rows, in an array that the caller frees with free. Returns NULL with an exception set if memory is short. */
void *tms_py_copy_rows(tms_py_row_source_t source, const void *context, size_t row_bytes, size_t *count);

/* Returns a row for each managed allocation, in such an array. */
tms_segment_info_t *tms_py_copy_segments(const tms_api_t *api, size_t *count);

#endif
