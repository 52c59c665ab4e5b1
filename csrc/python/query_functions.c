/* Queries of devices, allocations, tags and counters. Only tag_info and in_transition keep the GIL, because they never
 * block. The others may wait for the driver or the saver's lock. */
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/status.h"
#include "convert.h"
#include "copies.h"
#include "errors.h"
#include "functions.h"
#include "module_state.h"
#include "rows.h"

/* One query of the core: its arguments and its result. */
typedef struct query {
    int32_t device;
    uint64_t address;
    union {
        int32_t count;
        uint64_t mask;
        struct {
            uint64_t free_bytes, total_bytes;
        } memory;
        tms_device_info_t device_info;
        tms_export_t exported;
    };
} query_t;

typedef tms_status_t (*core_function_t)(const tms_api_t *api, query_t *query, tms_error_t *error);

/* Calls a function of the core without the GIL. False with an exception set if it fails. */
static bool ask(PyObject *module, core_function_t function, query_t *query) {
    const tms_api_t *api = tms_py_api(module);
    tms_status_t status;
    tms_error_t error;

    tms_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS;
    status = function(api, query, &error);
    Py_END_ALLOW_THREADS;
    if (status != TMS_OK) tms_py_raise(&error);
    return status == TMS_OK;
}

typedef PyObject *(*make_row_t)(PyObject *module, const void *row);

/* Returns a list of rows that were copied, and frees them. NULL with an exception set if there is one already. */
static PyObject *take_rows(PyObject *module, void *rows, size_t count, size_t row_bytes, make_row_t make_row) {
    PyObject *list = rows ? PyList_New((Py_ssize_t)count) : NULL;

    for (size_t index = 0; list && index < count; index++) {
        PyObject *row = make_row(module, (const char *)rows + index * row_bytes);
        if (!row || PyList_SetItem(list, (Py_ssize_t)index, row) < 0) Py_CLEAR(list);
    }
    free(rows);
    return list;
}

static tms_status_t refresh_peers(const tms_api_t *api, query_t *query, tms_error_t *error) {
    (void)query;
    return api->refresh_peers(error);
}

PyObject *tms_py_refresh_peers(PyObject *module, PyObject *unused) {
    (void)unused;
    if (!ask(module, refresh_peers, NULL)) return NULL;
    Py_RETURN_NONE;
}

/* A call of a listener of listen_devices that the main thread of `process` has yet to make. A forked child has a copy, which
 * it does not make: it would do so while Python's and our locks are still those of threads of the parent. */
typedef struct pending_call {
    PyObject *listener;
    int device;
    pid_t process;
} pending_call_t;

static int call_listener(void *argument) {
    const pending_call_t call = *(pending_call_t *)argument;
    free(argument);
    if (call.process != getpid()) return 0;
    PyObject *result = PyObject_CallFunction(call.listener, "i", call.device);

    if (!result) PyErr_WriteUnraisable(call.listener);
    Py_XDECREF(result);
    return 0;
}

/* The thread may hold torch's lock, and another one may wait for that lock with the GIL. So the GIL is not taken here. */
static int32_t request_call(void *listener, int32_t device) {
    pending_call_t *call = Py_IsInitialized() ? malloc(sizeof *call) : NULL;
    if (!call) return 0;
    *call = (pending_call_t){listener, device, getpid()};
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

static tms_status_t device_count(const tms_api_t *api, query_t *query, tms_error_t *error) {
    return api->device_count(&query->count, error);
}

PyObject *tms_py_device_count(PyObject *module, PyObject *unused) {
    query_t query = {0};

    (void)unused;
    return ask(module, device_count, &query) ? PyLong_FromLong(query.count) : NULL;
}

static tms_status_t active_devices(const tms_api_t *api, query_t *query, tms_error_t *error) {
    return api->active_devices(&query->mask, error);
}

PyObject *tms_py_active_devices(PyObject *module, PyObject *unused) {
    query_t query = {0};

    (void)unused;
    return ask(module, active_devices, &query) ? PyLong_FromUnsignedLongLong(query.mask) : NULL;
}

static tms_status_t device_memory(const tms_api_t *api, query_t *query, tms_error_t *error) {
    return api->device_memory(query->device, &query->memory.free_bytes, &query->memory.total_bytes, error);
}

PyObject *tms_py_device_memory(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"device_memory", 1, 1, {"device"}};
    query_t query = {0};
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &query.device) ||
        !ask(module, device_memory, &query))
        return NULL;
    return tms_py_device_memory_row(module, query.memory.free_bytes, query.memory.total_bytes);
}

static tms_status_t device_info(const tms_api_t *api, query_t *query, tms_error_t *error) {
    return api->device_info(query->device, &query->device_info, error);
}

PyObject *tms_py_device_info(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"device_info", 1, 1, {"device"}};
    query_t query = {0};
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_i32(&call, 0, &query.device) ||
        !ask(module, device_info, &query))
        return NULL;
    return tms_py_device_info_row(module, &query.device_info);
}

PyObject *tms_py_in_transition(PyObject *module, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(tms_py_api(module)->in_transition());
}

static PyObject *segment_row(PyObject *module, const void *row) { return tms_py_segment(module, row); }

PyObject *tms_py_segments(PyObject *module, PyObject *unused) {
    size_t count = 0;
    tms_segment_info_t *rows = tms_py_copy_segments(tms_py_api(module), &count);

    (void)unused;
    return take_rows(module, rows, count, sizeof(*rows), segment_row);
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

static PyObject *usage_row(PyObject *module, const void *row) { return tms_py_usage_row(module, row); }

PyObject *tms_py_usage(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"usage", 1, 2, {"tag", "device"}};
    usage_query_t query = {.api = tms_py_api(module), .device = TMS_NO_DEVICE};
    tms_usage_info_t *rows;
    size_t count = 0;
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) ||
        (call.values[0] != Py_None && !tms_py_get_tag(&call, 0, &query.tag)) || !tms_py_get_i32(&call, 1, &query.device))
        return NULL;
    rows = tms_py_copy_rows(write_usage, &query, sizeof(*rows), &count);
    return take_rows(module, rows, count, sizeof(*rows), usage_row);
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
    static const tms_py_signature_t signature = {"find", 1, 2, {"address", "bytes"}};
    const tms_api_t *api = tms_py_api(module);
    tms_segment_info_t row;
    tms_py_call_t call;
    tms_status_t status;
    uint64_t address, bytes = 1;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &address) ||
        !tms_py_get_u64(&call, 1, &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = api->find(address, bytes, &row);
    Py_END_ALLOW_THREADS;
    if (status != TMS_OK) Py_RETURN_NONE; /* NOT_MANAGED is the only failure */
    return tms_py_segment(module, &row);
}

static tms_status_t export_memory(const tms_api_t *api, query_t *query, tms_error_t *error) {
    return api->export_memory(query->address, &query->exported, error);
}

PyObject *tms_py_export_memory(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"export_memory", 1, 1, {"address"}};
    query_t query = {0};
    tms_py_call_t call;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &query.address) ||
        !ask(module, export_memory, &query))
        return NULL;
    return tms_py_export(module, &query.exported);
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

static PyObject *library_row(PyObject *module, const void *row) { return tms_py_library(module, row); }

PyObject *tms_py_libraries(PyObject *module, PyObject *unused) {
    tms_library_info_t *rows;
    size_t count = 0;

    (void)unused;
    rows = tms_py_copy_rows(write_libraries, tms_py_api(module), sizeof(*rows), &count);
    return take_rows(module, rows, count, sizeof(*rows), library_row);
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
