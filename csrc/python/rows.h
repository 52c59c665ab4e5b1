/* Rows: results with several named fields, as struct sequences, which are also tuples. Each interpreter has its own types,
 * in the module's state. Every function needs the GIL. */
#ifndef TMS_PYTHON_ROWS_H
#define TMS_PYTHON_ROWS_H

#include <Python.h>
#include <stdbool.h>

#include "include/tms.h"
#include "module_state.h"

/* Creates the types, as new references, and adds them to the module. False with an exception set on failure; the types
 * created so far stay in the array and are released with the module. */
bool tms_py_rows_create(PyObject *module, PyTypeObject *types[TMS_PY_ROWS]);

/* Each returns a new reference, or NULL with an exception set. */
PyObject *tms_py_segment(PyObject *module, const tms_segment_info_t *segment);
PyObject *tms_py_usage_row(PyObject *module, const tms_usage_info_t *usage);
PyObject *tms_py_library(PyObject *module, const tms_library_info_t *library);
PyObject *tms_py_report(PyObject *module, const tms_report_t *report);
PyObject *tms_py_export(PyObject *module, const tms_export_t *exported);
PyObject *tms_py_tag_info_row(PyObject *module, const tms_tag_info_t *info);
PyObject *tms_py_device_memory_row(PyObject *module, uint64_t free_bytes, uint64_t total_bytes);
PyObject *tms_py_device_info_row(PyObject *module, const tms_device_info_t *info);
PyObject *tms_py_region_settings(PyObject *module, const tms_region_settings_t *settings, int32_t depth);
PyObject *tms_py_event(PyObject *module, const tms_event_t *event);
PyObject *tms_py_event_level(PyObject *module, const tms_event_level_t *level);
/* Takes the references to the lists. Either list may be NULL with an exception set. */
PyObject *tms_py_events_copy(PyObject *module, PyObject *events, PyObject *levels, uint64_t recorded, uint64_t capacity);

#endif
