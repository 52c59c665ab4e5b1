#include "copies.h"

#include <stdlib.h>

/* The number of rows may grow between two calls, hence the spare room and the loop. */
static void *copy(tms_py_row_source_t source, const void *context, size_t row_bytes, size_t *count) {
    enum { ROOM_TO_SPARE = 16 };
    void *rows = NULL;
    size_t capacity = 0;

    while ((*count = source(context, rows, capacity)) > capacity || !rows) {
        free(rows);
        capacity = *count + *count / 2 + ROOM_TO_SPARE;
        rows = malloc(capacity * row_bytes);
        if (!rows) return NULL;
    }
    return rows;
}

void *tms_py_copy_rows(tms_py_row_source_t source, const void *context, size_t row_bytes, size_t *count) {
    void *rows;

    Py_BEGIN_ALLOW_THREADS;
    rows = copy(source, context, row_bytes, count);
    Py_END_ALLOW_THREADS;
    return rows ? rows : PyErr_NoMemory();
}

static size_t write_segments(const void *api, void *rows, size_t capacity) {
    return ((const tms_api_t *)api)->segments(rows, capacity);
}

tms_segment_info_t *tms_py_copy_segments(const tms_api_t *api, size_t *count) {
    return tms_py_copy_rows(write_segments, api, sizeof(tms_segment_info_t), count);
}
