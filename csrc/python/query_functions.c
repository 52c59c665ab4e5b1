/* Queries of devices, allocations, tags and counters. Only tag_info and in_transition keep the GIL, because they never
 * block. The others may wait for the driver or the saver's lock. */
#include <stddef.h>
#include <stdlib.h>

#include "base/status.h"
#include "convert.h"
#include "copies.h"
#include "errors.h"
#include "functions.h"
#include "module_state.h"
#include "rows.h"

PyObject *tms_py_refresh_peers(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);
    tms_status_t status;
    tms_error_t error;

    (void)unused;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->refresh_peers(&error);
    Py_END_ALLOW_THREADS;
    if (status != TMS_OK) return tms_py_raise(&error);
    Py_RETURN_NONE;
}

/* A call of a listener of listen_devices that the main thread has yet to make. */
typedef struct pending_call {
    PyObject *listener;
    int device;
} pending_call_t;

static int call_listener(void *argument) {
    const pending_call_t call = *(pending_call_t *)argument;
    free(argument);
    PyObject *result = PyObject_CallFunction(call.listener, "i", call.device);

    if (!result) PyErr_WriteUnraisable(call.listener);
    Py_XDECREF(result);
    return 0;
}

/* The thread may hold torch's lock, and another one may wait for that lock with the GIL. So the GIL is not taken here. */
static int32_t request_call(void *listener, int32_t device) {
    pending_call_t *call = Py_IsInitialized() ? malloc(sizeof *call) : NULL;
    if (!call) return 0;
    *call = (pending_call_t){listener, device};
    if (Py_AddPendingCall(call_listener, call) == 0) return 1;
    free(call); /* the interpreter's queue is full */
    return 0;
}

/* The reference to a listener is never released: a call of it may be pending. */
PyObject *tms_py_listen_devices(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"listen_devices", 2, 2, {"listener", "mask"}};
    const tms_api_t *api = tms_py_api(module);
    PyObject *listener = NULL;
    uint64_t mask;
    tms_py_call_t call;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_callable(&call, 0, &listener) ||
        !tms_py_get_u64(&call, 1, &mask))
        return NULL;
    tms_error_clear(&error);
    Py_XINCREF(listener);
    if (api->listen_devices(listener ? request_call : NULL, listener, mask, &error) != TMS_OK) return tms_py_raise(&error);
    Py_RETURN_NONE;
}

PyObject *tms_py_device_count(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);
    int32_t count = 0;
    tms_status_t status;
    tms_error_t error;

    (void)unused;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->device_count(&count, &error);
    Py_END_ALLOW_THREADS;
    return status == TMS_OK ? PyLong_FromLong(count) : tms_py_raise(&error);
}

PyObject *tms_py_active_devices(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);
    uint64_t mask = 0;
    tms_status_t status;
    tms_error_t error;

    (void)unused;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->active_devices(&mask, &error);
    Py_END_ALLOW_THREADS;
    return status == TMS_OK ? PyLong_FromUnsignedLongLong(mask) : tms_py_raise(&error);
}

PyObject *tms_py_device_memory(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"device_memory", 1, 1, {"device"}};
    const tms_api_t *api = tms_py_api(module);
    uint64_t free_bytes = 0, total_bytes = 0;
    int32_t device;
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &device)) return NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->device_memory(device, &free_bytes, &total_bytes, &error);
    Py_END_ALLOW_THREADS;
    if (status != TMS_OK) return tms_py_raise(&error);
    return tms_py_device_memory_row(module, free_bytes, total_bytes);
}

PyObject *tms_py_device_info(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"device_info", 1, 1, {"device"}};
    const tms_api_t *api = tms_py_api(module);
    tms_device_info_t info;
    int32_t device;
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &device)) return NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->device_info(device, &info, &error);
    Py_END_ALLOW_THREADS;
    return status == TMS_OK ? tms_py_device_info_row(module, &info) : tms_py_raise(&error);
}

PyObject *tms_py_in_transition(PyObject *module, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(tms_py_api(module)->in_transition());
}

PyObject *tms_py_segments(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);
    tms_segment_info_t *rows;
    PyObject *list = NULL;
    size_t count = 0;

    (void)unused;
    rows = tms_py_copy_segments(api, &count);
    if (!rows) return NULL;
    list = PyList_New((Py_ssize_t)count);
    for (size_t index = 0; list && index < count; index++) {
        PyObject *row = tms_py_segment(module, &rows[index]);
        if (!row || PyList_SetItem(list, (Py_ssize_t)index, row) < 0) Py_CLEAR(list);
    }
    free(rows);
    return list;
}

typedef struct usage_query {
    const tms_api_t *api;
    const char *tag;
    int32_t device;
} usage_query_t;

static size_t write_usage(const void *context, void *rows, size_t capacity) {
    const usage_query_t *query = context;
    return query->api->usage(query->tag, query->device, rows, capacity);
}

PyObject *tms_py_usage(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"usage", 1, 2, {"tag", "device"}};
    usage_query_t query = {.api = tms_py_api(module), .device = TMS_NO_DEVICE};
    tms_usage_info_t *rows;
    PyObject *list = NULL;
    size_t count = 0;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) ||
        (call.values[0] != Py_None && !tms_py_get_tag(&call, 0, &query.tag)) || !tms_py_get_i32(&call, 1, &query.device))
        return NULL;
    rows = tms_py_copy_rows(write_usage, &query, sizeof(*rows), &count);
    if (!rows) return NULL;
    list = PyList_New((Py_ssize_t)count);
    for (size_t index = 0; list && index < count; index++) {
        PyObject *row = tms_py_usage_row(module, &rows[index]);
        if (!row || PyList_SetItem(list, (Py_ssize_t)index, row) < 0) Py_CLEAR(list);
    }
    free(rows);
    return list;
}

PyObject *tms_py_reset_peaks(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);

    (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    api->reset_peaks();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *tms_py_find(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"find", 1, 1, {"address"}};
    const tms_api_t *api = tms_py_api(module);
    tms_segment_info_t row;
    tms_py_call_t call;
    tms_status_t status;
    uint64_t address;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &address)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = api->find(address, &row);
    Py_END_ALLOW_THREADS;
    if (status != TMS_OK) Py_RETURN_NONE; /* NOT_MANAGED is the only failure */
    return tms_py_segment(module, &row);
}

PyObject *tms_py_export_memory(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"export_memory", 1, 1, {"address"}};
    const tms_api_t *api = tms_py_api(module);
    tms_export_t exported;
    tms_py_call_t call;
    tms_status_t status;
    tms_error_t error;
    uint64_t address;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &address)) return NULL;
    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = api->export_memory(address, &exported, &error);
    Py_END_ALLOW_THREADS;
    return status == TMS_OK ? tms_py_export(module, &exported) : tms_py_raise(&error);
}

PyObject *tms_py_tag_info(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"tag_info", 1, 1, {"tag"}};
    tms_tag_info_t info;
    tms_py_call_t call;
    const char *tag;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_tag(&call, 0, &tag)) return NULL;
    tms_py_api(module)->tag_info(tag, &info);
    return tms_py_tag_info_row(module, &info);
}

static size_t write_tags(const void *api, void *rows, size_t capacity) {
    return ((const tms_api_t *)api)->tags(rows, capacity);
}

PyObject *tms_py_tags(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);
    tms_tag_row_t *rows;
    PyObject *dictionary;
    size_t count = 0;

    (void)unused;
    rows = tms_py_copy_rows(write_tags, api, sizeof(*rows), &count);
    if (!rows) return NULL;
    dictionary = PyDict_New();
    while (dictionary && count-- > 0) { /* the oldest first */
        PyObject *name = tms_py_text(rows[count].name);
        if (!name || PyDict_SetItem(dictionary, name, rows[count].used ? Py_True : Py_False) < 0) Py_CLEAR(dictionary);
        Py_XDECREF(name);
    }
    free(rows);
    return dictionary;
}

static size_t write_libraries(const void *api, void *rows, size_t capacity) {
    return ((const tms_api_t *)api)->libraries(rows, capacity);
}

PyObject *tms_py_libraries(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);
    tms_library_info_t *rows;
    PyObject *list = NULL;
    size_t count = 0;

    (void)unused;
    rows = tms_py_copy_rows(write_libraries, api, sizeof(*rows), &count);
    if (!rows) return NULL;
    list = PyList_New((Py_ssize_t)count);
    for (size_t index = 0; list && index < count; index++) {
        PyObject *row = tms_py_library(module, &rows[index]);
        if (!row || PyList_SetItem(list, (Py_ssize_t)index, row) < 0) Py_CLEAR(list);
    }
    free(rows);
    return list;
}

static const struct counter {
    const char *name;
    size_t offset;
} counters[] = {
#define COUNTER(name) {#name, offsetof(tms_counters_t, name)},
    TMS_COUNTERS(COUNTER)
#undef COUNTER
};

PyObject *tms_py_counters(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);
    tms_counters_t values;
    PyObject *dictionary;

    (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    api->counters(&values);
    Py_END_ALLOW_THREADS;
    dictionary = PyDict_New();
    for (size_t index = 0; dictionary && index < sizeof(counters) / sizeof(counters[0]); index++) {
        uint64_t number = *(const uint64_t *)((const char *)&values + counters[index].offset);
        PyObject *value = PyLong_FromUnsignedLongLong(number);
        if (!value || PyDict_SetItemString(dictionary, counters[index].name, value) < 0) Py_CLEAR(dictionary);
        Py_XDECREF(value);
    }
    return dictionary;
}
