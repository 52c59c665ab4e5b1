#include "records.h"

#include "convert.h"

/* The keys of a dict, in its order. */
enum { ADDRESS, BYTES, RESERVED_BYTES, BACKUP_BYTES, DEVICE, STATE, BACKUP, TAG, AGE, STATE_AGE, KEYS };

static const char *const keys[KEYS] = {"address", "bytes", "reserved_bytes", "backup_bytes", "device", "state", "backup",
                                       "tag",     "age",   "state_age"};
#define NAME(kind, number, name) [number] = (name),
static const char *const states[] = {TMS_SEGMENT_STATES(NAME)};
static const char *const backups[] = {TMS_BACKUP_KINDS(NAME)};
#undef NAME

enum { STATE_COUNT = sizeof(states) / sizeof(states[0]), BACKUP_COUNT = sizeof(backups) / sizeof(backups[0]) };

/* A tuple of interned strings, one object for all dicts. */
static PyObject *strings(const char *const *texts, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);

    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        PyObject *text = PyUnicode_InternFromString(texts[i]);
        if (!text || PyTuple_SetItem(tuple, i, text) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *tms_py_state_names(void) { return strings(states, STATE_COUNT); }

/* What all dicts of one list have in common. */
typedef struct common {
    PyObject *keys, *states, *backups;
    PyObject *empty;      /* a dict of all keys: a copy of it costs a fifth of adding them one by one */
    const char *tag_text; /* the latest tag, interned: most allocations have that of the one before */
    PyObject *tag;
} common_t;

static void drop(common_t *common) {
    Py_XDECREF(common->keys);
    Py_XDECREF(common->states);
    Py_XDECREF(common->backups);
    Py_XDECREF(common->empty);
    Py_XDECREF(common->tag);
}

static bool prepare(common_t *common) {
    *common = (common_t){.keys = strings(keys, KEYS),
                         .states = strings(states, STATE_COUNT),
                         .backups = strings(backups, BACKUP_COUNT),
                         .empty = PyDict_New()};
    if (!common->keys || !common->states || !common->backups || !common->empty) return false;
    for (Py_ssize_t i = 0; i < KEYS; i++)
        if (PyDict_SetItem(common->empty, PyTuple_GetItem(common->keys, i), Py_None) < 0) return false;
    return true;
}

/* A new reference. */
static PyObject *tag_of(common_t *common, const char *text) {
    if (text != common->tag_text) {
        Py_XDECREF(common->tag);
        common->tag = tms_py_text(text);
        common->tag_text = common->tag ? text : NULL;
    }
    return Py_XNewRef(common->tag);
}

/* Takes the reference to the value, which may be NULL with an exception set. */
static bool set(const common_t *common, PyObject *record, Py_ssize_t key, PyObject *value) {
    const bool done = value && PyDict_SetItem(record, PyTuple_GetItem(common->keys, key), value) == 0;

    Py_XDECREF(value);
    return done;
}

static bool fill(common_t *common, PyObject *record, const tms_segment_info_t *row, double now) {
    return set(common, record, ADDRESS, PyLong_FromUnsignedLongLong(row->address)) &&
           set(common, record, BYTES, PyLong_FromUnsignedLongLong(row->bytes)) &&
           set(common, record, RESERVED_BYTES, PyLong_FromUnsignedLongLong(row->reserved_bytes)) &&
           set(common, record, BACKUP_BYTES, PyLong_FromUnsignedLongLong(row->backup_bytes)) &&
           set(common, record, DEVICE, PyLong_FromLong(row->device)) &&
           set(common, record, STATE, Py_XNewRef(PyTuple_GetItem(common->states, row->state))) &&
           set(common, record, BACKUP, Py_XNewRef(PyTuple_GetItem(common->backups, row->backup))) &&
           set(common, record, TAG, tag_of(common, row->tag)) &&
           set(common, record, AGE, PyFloat_FromDouble(now - row->allocated_at)) &&
           set(common, record, STATE_AGE, PyFloat_FromDouble(now - row->changed_at));
}

PyObject *tms_py_records(const tms_segment_info_t *rows, size_t count, double now) {
    common_t common;
    PyObject *list = prepare(&common) ? PyList_New((Py_ssize_t)count) : NULL;

    for (size_t i = 0; list && i < count; i++) {
        PyObject *record = PyDict_Copy(common.empty);
        const bool filled = record && fill(&common, record, &rows[i], now);
        /* The list takes the reference, also of an incomplete one. */
        if ((record && PyList_SetItem(list, (Py_ssize_t)i, record) < 0) || !filled) Py_CLEAR(list);
    }
    drop(&common);
    return list;
}
