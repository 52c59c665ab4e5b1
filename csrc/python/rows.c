#include "rows.h"

#include "base/status.h"
#include "convert.h"

enum { MAX_FIELDS = 22 };

/* The fields are in the order of the functions below, and of _core.pyi. */
static PyStructSequence_Field segment_fields[] = {{"address", "address of the first byte"},
                                                  {"bytes", "size that was requested"},
                                                  {"reserved_bytes", "size of the address range"},
                                                  {"backup_bytes", "size of its backup now"},
                                                  {"device", "CUDA ordinal"},
                                                  {"state", "its state, one of STATE_*"},
                                                  {"backup", "its backup, one of BACKUP_*"},
                                                  {"tag", "tag of the region"},
                                                  {"contents", "origin of its contents, one of CONTENTS_*"},
                                                  {"allocated_at", "time when it was made, in seconds of CLOCK_MONOTONIC"},
                                                  {"changed_at", "time when its state last changed"},
                                                  {NULL, NULL}};
static PyStructSequence_Field usage_fields[] = {{"tag", "tag of the allocations; None: every tag"},
                                                {"device", "CUDA ordinal; -1: every device"},
                                                {"allocations", "number of allocations in every state"},
                                                {"bytes", "size that was requested"},
                                                {"resident_bytes", "mapped device memory"},
                                                {"paused_bytes", "device memory that a resume maps"},
                                                {"damaged_bytes", "device memory that cannot be used"},
                                                {"backup_bytes", "size of their backups now"},
                                                {"resident_peak_bytes", "most device memory that was mapped at once"},
                                                {"slack_bytes", "device memory of freed allocations that runs hold"},
                                                {"deferred_bytes", "device memory of frees that wait"},
                                                {NULL, NULL}};
static PyStructSequence_Field export_fields[] = {{"address", "address of the allocation"},
                                                 {"bytes", "size of the physical memory"},
                                                 {"generation", "number of the physical memory, unique in this process"},
                                                 {"device", "CUDA ordinal"},
                                                 {"descriptor", "the file descriptor, which stays the library's"},
                                                 {NULL, NULL}};
static PyStructSequence_Field report_fields[] = {{"allocations", "number of allocations that changed state"},
                                                 {"bytes", "device memory that was released or mapped"},
                                                 {"copied_bytes", "bytes that were copied to or from backups"},
                                                 {"unknown_tags", "tags of the call that no allocation ever had"},
                                                 {"seconds", "duration of the native part of the call"},
                                                 {"unchanged_bytes", "bytes that retained backups had already"},
                                                 {"bytes_by_tag", "bytes of each of the first TMS_REPORT_TAGS tags"},
                                                 {NULL, NULL}};
static PyStructSequence_Field tag_info_fields[] = {{"paused", "number of its allocations that are not active"},
                                                   {"epoch", "number of pauses that ever changed one"},
                                                   {"discards", "number of times that a pause discarded contents of one"},
                                                   {NULL, NULL}};
static PyStructSequence_Field device_memory_fields[] = {{"free", "free bytes"}, {"total", "size in bytes"}, {NULL, NULL}};
static PyStructSequence_Field device_info_fields[] = {
    {"uuid", "UUID of the GPU as NVML writes it"}, {"total_bytes", "size of its memory"}, {NULL, NULL}};
static PyStructSequence_Field region_settings_fields[] = {{"tag", "tag of the allocations"},
                                                          {"backup", "one of BACKUP_*"},
                                                          {"managed", "whether allocations are managed"},
                                                          {"depth", "number of regions around; 0: none"},
                                                          {"runs", "whether allocations may share handles"},
                                                          {NULL, NULL}};

static PyStructSequence_Field event_fields[] = {{"kind", "name of its kind: TMS_EVENT_KINDS of tms_events.h"},
                                                {"phase", "name of its phase: TMS_EVENT_PHASES; empty for other kinds"},
                                                {"operation", "operation of the call; empty: no call"},
                                                {"began", "begin, in nanoseconds of CLOCK_MONOTONIC"},
                                                {"ended", "end, in nanoseconds of CLOCK_MONOTONIC"},
                                                {"busy", "nanoseconds of work in it"},
                                                {"call", "number of the pause or resume; 0: none"},
                                                {"thread", "kernel's number of the thread"},
                                                {"device", "CUDA ordinal, or -1"},
                                                {"tag", "tag of the allocation, or None"},
                                                {"address", "address of the allocation"},
                                                {"allocations", "number of allocations"},
                                                {"bytes", "as tms_event_t says for the kind"},
                                                {"copied_bytes", "bytes that were copied to or from backups"},
                                                {"unchanged_bytes", "bytes that retained backups had already"},
                                                {"total_bytes", "size of the device's memory"},
                                                {"resident_change", "change of the resident bytes"},
                                                {"paused_change", "change of the paused bytes"},
                                                {"backup_change", "change of the bytes in backups"},
                                                {"status", "0, or a status code"},
                                                {"status_name", "name of the status"},
                                                {"driver_result", "CUresult of the failed driver call"},
                                                {NULL, NULL}};
static PyStructSequence_Field event_level_fields[] = {
    {"tag", "tag of the allocations"},    {"device", "CUDA ordinal"},
    {"resident_bytes", "mapped bytes"},   {"paused_bytes", "bytes without physical memory"},
    {"backup_bytes", "bytes in backups"}, {NULL, NULL}};
static PyStructSequence_Field events_copy_fields[] = {
    {"events", "latest events, the oldest first"},
    {"levels", "levels after the last event; the sum of the rows is the total"},
    {"recorded", "number of events so far"},
    {"capacity", "maximum number of kept events"},
    {NULL, NULL}};

static PyStructSequence_Field library_fields[] = {{"path", "path of its file; empty: code that lies in no file"},
                                                  {"device", "CUDA ordinal; -1: not known"},
                                                  {"bytes", "sum of the requested sizes"},
                                                  {"allocations", "number of allocations"},
                                                  {NULL, NULL}};

static PyStructSequence_Desc descriptions[TMS_PY_ROWS] = {
    [TMS_PY_SEGMENT] = {"torch_memory_saver._core.Segment", "An allocation.", segment_fields, 11},
    [TMS_PY_USAGE] = {"torch_memory_saver._core.Usage", "Allocations of a tag or a device.", usage_fields, 11},
    [TMS_PY_EXPORT] = {"torch_memory_saver._core.Export", "Exported physical memory.", export_fields, 5},
    [TMS_PY_REPORT] = {"torch_memory_saver._core.Report", "Report of a pause or resume.", report_fields, 7},
    [TMS_PY_TAG_INFO] = {"torch_memory_saver._core.TagInfo", "Pauses of a tag.", tag_info_fields, 3},
    [TMS_PY_DEVICE_MEMORY] = {"torch_memory_saver._core.DeviceMemory", "A device's memory.", device_memory_fields, 2},
    [TMS_PY_DEVICE_INFO] = {"torch_memory_saver._core.DeviceInfo", "Name and size of a device.", device_info_fields, 2},
    [TMS_PY_REGION_SETTINGS] = {"torch_memory_saver._core.RegionSettings", "A thread's settings.", region_settings_fields,
                                5},
    [TMS_PY_EVENT] = {"torch_memory_saver._core.Event", "An event.", event_fields, MAX_FIELDS},
    [TMS_PY_EVENT_LEVEL] = {"torch_memory_saver._core.EventLevel", "Level of a tag on a device.", event_level_fields, 5},
    [TMS_PY_EVENTS_COPY] = {"torch_memory_saver._core.EventsCopy", "The latest events.", events_copy_fields, 4},
    [TMS_PY_LIBRARY] = {"torch_memory_saver._core.Library", "Memory of a library.", library_fields, 4},
};

bool tms_py_rows_create(PyObject *module, PyTypeObject *types[TMS_PY_ROWS]) {
    for (int row = 0; row < TMS_PY_ROWS; row++) {
        types[row] = PyStructSequence_NewType(&descriptions[row]);
        if (!types[row] || PyModule_AddType(module, types[row]) < 0) return false;
    }
    return true;
}

/* Makes a row. Takes the references to the values. Any value may be NULL with an exception set. */
static PyObject *make(PyObject *module, tms_py_row_t row, PyObject *const *values) {
    PyTypeObject *type = ((tms_py_state_t *)PyModule_GetState(module))->rows[row];
    const int count = descriptions[row].n_in_sequence;
    PyObject *result;
    bool complete = true;

    for (int field = 0; field < count; field++) complete = complete && values[field];
    result = complete ? PyStructSequence_New(type) : NULL;
    for (int field = 0; field < count; field++)
        if (result)
            PyStructSequence_SetItem(result, field, values[field]);
        else
            Py_XDECREF(values[field]);
    return result;
}

static PyObject *number(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }

PyObject *tms_py_segment(PyObject *module, const tms_segment_info_t *segment) {
    PyObject *values[MAX_FIELDS] = {number(segment->address),
                                    number(segment->bytes),
                                    number(segment->reserved_bytes),
                                    number(segment->backup_bytes),
                                    PyLong_FromLong(segment->device),
                                    PyLong_FromLong(segment->state),
                                    PyLong_FromLong(segment->backup),
                                    tms_py_text(segment->tag),
                                    PyLong_FromLong(segment->contents),
                                    PyFloat_FromDouble(segment->allocated_at),
                                    PyFloat_FromDouble(segment->changed_at)};

    return make(module, TMS_PY_SEGMENT, values);
}

PyObject *tms_py_usage_row(PyObject *module, const tms_usage_info_t *usage) {
    PyObject *values[MAX_FIELDS] = {usage->tag ? tms_py_text(usage->tag) : Py_NewRef(Py_None),
                                    PyLong_FromLong(usage->device),
                                    number(usage->allocations),
                                    number(usage->bytes),
                                    number(usage->resident_bytes),
                                    number(usage->paused_bytes),
                                    number(usage->damaged_bytes),
                                    number(usage->backup_bytes),
                                    number(usage->resident_peak_bytes),
                                    number(usage->slack_bytes),
                                    number(usage->deferred_bytes)};

    return make(module, TMS_PY_USAGE, values);
}

PyObject *tms_py_export(PyObject *module, const tms_export_t *exported) {
    PyObject *values[MAX_FIELDS] = {number(exported->address), number(exported->bytes), number(exported->generation),
                                    PyLong_FromLong(exported->device), PyLong_FromLong(exported->descriptor)};

    return make(module, TMS_PY_EXPORT, values);
}

static PyObject *bytes_by_tag(const tms_report_t *report) {
    PyObject *sums = PyDict_New();

    for (int i = 0; sums && i < TMS_REPORT_TAGS && report->tags[i]; i++) {
        PyObject *tag = tms_py_text(report->tags[i]), *bytes = number(report->tag_bytes[i]);
        if (!tag || !bytes || PyDict_SetItem(sums, tag, bytes) < 0) Py_CLEAR(sums);
        Py_XDECREF(tag);
        Py_XDECREF(bytes);
    }
    return sums;
}

PyObject *tms_py_report(PyObject *module, const tms_report_t *report) {
    PyObject *values[MAX_FIELDS] = {number(report->allocations),         number(report->bytes),
                                    number(report->copied_bytes),        number(report->unknown_tags),
                                    PyFloat_FromDouble(report->seconds), number(report->unchanged_bytes)};

    values[6] = bytes_by_tag(report);

    return make(module, TMS_PY_REPORT, values);
}

PyObject *tms_py_tag_info_row(PyObject *module, const tms_tag_info_t *info) {
    PyObject *values[MAX_FIELDS] = {number(info->paused), number(info->pause_epoch), number(info->discards)};

    return make(module, TMS_PY_TAG_INFO, values);
}

PyObject *tms_py_device_memory_row(PyObject *module, uint64_t free_bytes, uint64_t total_bytes) {
    PyObject *values[MAX_FIELDS] = {number(free_bytes), number(total_bytes)};

    return make(module, TMS_PY_DEVICE_MEMORY, values);
}

PyObject *tms_py_device_info_row(PyObject *module, const tms_device_info_t *info) {
    PyObject *values[MAX_FIELDS] = {tms_py_text(info->uuid), number(info->total_bytes)};

    return make(module, TMS_PY_DEVICE_INFO, values);
}

PyObject *tms_py_region_settings(PyObject *module, const tms_region_settings_t *settings, int32_t depth) {
    PyObject *values[MAX_FIELDS] = {tms_py_text(settings->tag), PyLong_FromLong(settings->backup),
                                    PyBool_FromLong(settings->managed), PyLong_FromLong(depth),
                                    PyBool_FromLong(!settings->own_handles)};

    return make(module, TMS_PY_REGION_SETTINGS, values);
}

static PyObject *signed_number(uint64_t difference) { return PyLong_FromLongLong((int64_t)difference); }

/* Returns the name of a kind or phase, which is one object for all events. */
static PyObject *name_of(const char *const *names, size_t count, int32_t index) {
    return PyUnicode_InternFromString(index >= 0 && (size_t)index < count ? names[index] : "unknown");
}

PyObject *tms_py_event(PyObject *module, const tms_event_t *event) {
#define NAME(suffix, number, name) [number] = (name),
    static const char *const kinds[] = {TMS_EVENT_KINDS(NAME)}, *const phases[] = {TMS_EVENT_PHASES(NAME)};
#undef NAME
    PyObject *values[MAX_FIELDS] = {
        name_of(kinds, sizeof(kinds) / sizeof(kinds[0]), event->kind),
        name_of(phases, sizeof(phases) / sizeof(phases[0]), event->phase),
        PyUnicode_InternFromString(event->operation ? event->operation : ""),
        number(event->began),
        number(event->ended),
        number(event->busy),
        number(event->call),
        PyLong_FromLong(event->thread),
        PyLong_FromLong(event->device),
        event->tag ? tms_py_text(event->tag) : Py_NewRef(Py_None),
        number(event->address),
        number(event->allocations),
        number(event->bytes),
        number(event->copied_bytes),
        number(event->unchanged_bytes),
        number(event->total_bytes),
        signed_number(event->change.resident_bytes),
        signed_number(event->change.paused_bytes),
        signed_number(event->change.backup_bytes),
        PyLong_FromLong(event->status),
        PyUnicode_InternFromString(tms_status_name((tms_status_t)event->status)),
        PyLong_FromLong(event->driver_result),
    };

    return make(module, TMS_PY_EVENT, values);
}

PyObject *tms_py_event_level(PyObject *module, const tms_event_level_t *level) {
    PyObject *values[MAX_FIELDS] = {tms_py_text(level->tag), PyLong_FromLong(level->device),
                                    number(level->holds.resident_bytes), number(level->holds.paused_bytes),
                                    number(level->holds.backup_bytes)};

    return make(module, TMS_PY_EVENT_LEVEL, values);
}

PyObject *tms_py_events_copy(PyObject *module, PyObject *events, PyObject *levels, uint64_t recorded, uint64_t capacity) {
    PyObject *values[MAX_FIELDS] = {events, levels, number(recorded), number(capacity)};

    return make(module, TMS_PY_EVENTS_COPY, values);
}

PyObject *tms_py_library(PyObject *module, const tms_library_info_t *library) {
    PyObject *path = PyUnicode_DecodeFSDefault(library->path);
    PyObject *values[MAX_FIELDS] = {path, PyLong_FromLong(library->device), number(library->bytes),
                                    number(library->allocations)};

    return make(module, TMS_PY_LIBRARY, values);
}
