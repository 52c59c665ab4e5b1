/* pause, resume and the count of guard bytes, and their callbacks.
 *
 * The core calls back on the thread of the call, with no lock of the library held and the GIL released. Each callback
 * acquires the GIL while it runs. An exception in a callback is kept and cancels the call at the next check; the call then
 * raises it. An exception after the commit point is raised when the call has finished. */
#include <string.h>

#include "base/status.h"
#include "convert.h"
#include "errors.h"
#include "functions.h"
#include "module_state.h"
#include "rows.h"
#include "selection.h"

/* The state of a running call. */
typedef struct running {
    PyThreadState *thread; /* the saved thread state while the GIL is released */
    tms_py_callers_t callers;
    PyObject *allocations, *ranges, *used; /* the result of find_live, which the core reads until the call ends */
    PyObject *type, *value, *traceback;    /* the exception that ends the call; all NULL if there is none yet */
} running_call_t;

/* Called with the GIL held: keeps the current exception, unless one is kept already. */
static void keep_exception(running_call_t *c) {
    if (c->type)
        PyErr_Clear();
    else
        PyErr_Fetch(&c->type, &c->value, &c->traceback);
}

/* `interrupted` of the call: not 0 if an exception is kept. Runs pending signal handlers if `signals` is set. They must not
 * pause or resume. */
static int32_t check_interrupted(void *context) {
    running_call_t *c = context;

    if (c->callers.signals && !c->type) {
        PyEval_RestoreThread(c->thread);
        if (PyErr_CheckSignals()) keep_exception(c);
        c->thread = PyEval_SaveThread();
    }
    return c->type != NULL;
}

static bool are_sorted(const tms_live_range_t *ranges, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (ranges[i].begin >= ranges[i].end || (i && ranges[i - 1].end > ranges[i].begin)) return false;
    return true;
}

static bool is_sorted(const tms_live_t *live) {
    for (size_t i = 1; i < live->allocation_count; i++)
        if (live->allocations[i - 1] >= live->allocations[i]) return false;
    return are_sorted(live->ranges, live->range_count);
}

#define FIND_LIVE_MUST "find_live() must return"

/* Reads the third part of the result of find_live: where the used bytes of each range end. False: an exception is set. */
static bool read_used(running_call_t *c, PyObject *result, tms_live_t *live) {
    size_t count;

    c->used = Py_NewRef(PyTuple_GetItem(result, 2));
    live->used = tms_py_numbers(c->used, 1, FIND_LIVE_MUST, &count);
    if (!live->used) return false;
    bool fits = count == live->range_count;
    for (size_t i = 0; fits && i < count; i++)
        fits = live->used[i] > live->ranges[i].begin && live->used[i] <= live->ranges[i].end;
    if (!fits) PyErr_SetString(PyExc_ValueError, FIND_LIVE_MUST " for each range an end of the used bytes, inside it");
    return fits;
}

/* Reads the result of find_live: (addresses, ranges) or (addresses, ranges, used) as bytes. False: an exception is set. */
static bool read_live(running_call_t *c, PyObject *result, tms_live_t *live) {
    const Py_ssize_t size = PyTuple_Check(result) ? PyTuple_Size(result) : 0;
    const uint64_t *ranges;

    if (size != 2 && size != 3) {
        PyErr_Format(PyExc_TypeError, FIND_LIVE_MUST " None or two or three bytes objects, not %R", result);
        return false;
    }
    c->allocations = Py_NewRef(PyTuple_GetItem(result, 0));
    c->ranges = Py_NewRef(PyTuple_GetItem(result, 1));
    live->allocations = tms_py_numbers(c->allocations, 1, FIND_LIVE_MUST, &live->allocation_count);
    ranges = live->allocations ? tms_py_numbers(c->ranges, 2, FIND_LIVE_MUST, &live->range_count) : NULL;
    if (!ranges) return false;
    live->ranges = (const tms_live_range_t *)(const void *)ranges;
    if (size == 3 && !read_used(c, result, live)) return false;
    if (is_sorted(live)) return true;
    PyErr_SetString(PyExc_ValueError, FIND_LIVE_MUST " addresses and ranges in order, that do not overlap");
    return false;
}
_Static_assert(sizeof(tms_live_range_t) == 2 * sizeof(uint64_t), "pairs of numbers are ranges");

static int32_t call_find_live(void *context, tms_live_t *live) {
    running_call_t *c = context;
    tms_live_t found = {0};
    PyObject *result;
    bool known = false;

    PyEval_RestoreThread(c->thread);
    result = PyObject_CallFunctionObjArgs(c->callers.find_live, NULL);
    if (result && result != Py_None) known = read_live(c, result, &found);
    Py_XDECREF(result);
    if (PyErr_Occurred()) keep_exception(c);
    c->thread = PyEval_SaveThread();
    if (known) *live = found;
    return !known;
}

static void report_progress(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    running_call_t *c = context;
    PyObject *result;

    if (c->type) return; /* the call is about to end */
    PyEval_RestoreThread(c->thread);
    result =
        PyObject_CallFunction(c->callers.progress, "KK", (unsigned long long)done_bytes, (unsigned long long)total_bytes);
    if (!result) keep_exception(c);
    Py_XDECREF(result);
    c->thread = PyEval_SaveThread();
}

/* Sets the callbacks of the selection, and releases the GIL for the call. */
static void begin(tms_selection_t *selection, running_call_t *c, tms_error_t *error) {
    selection->find_live = c->callers.find_live ? call_find_live : NULL;
    selection->live_context = c;
    selection->on_progress = c->callers.progress ? report_progress : NULL;
    selection->on_progress_context = c;
    if (c->callers.signals || c->callers.find_live || c->callers.progress) {
        selection->interrupted = check_interrupted;
        selection->interrupt_context = c;
    }
    tms_error_clear(error);
    c->thread = PyEval_SaveThread();
}

/* Acquires the GIL again, and frees the selection's array of tags. False with an exception set if the call has failed. */
static bool end(const tms_selection_t *selection, running_call_t *c, tms_status_t status, const tms_error_t *error) {
    PyEval_RestoreThread(c->thread);
    PyMem_Free((void *)selection->tags);
    Py_XDECREF(c->allocations);
    Py_XDECREF(c->ranges);
    Py_XDECREF(c->used);
    if (c->type)
        PyErr_Restore(c->type, c->value, c->traceback);
    else if (status != TMS_OK)
        tms_py_raise(error);
    return !c->type && status == TMS_OK;
}

PyObject *tms_py_pause(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    const tms_api_t *api = tms_py_api(module);
    tms_selection_t selection = {0};
    running_call_t running = {0};
    tms_report_t report;
    tms_error_t error;

    if (!tms_py_get_pause("pause", arguments, positional, keywords, &selection, &running.callers)) return NULL;
    begin(&selection, &running, &error);
    if (!end(&selection, &running, api->pause(&selection, &report, &error), &error)) return NULL;
    return tms_py_report(module, &report);
}

PyObject *tms_py_check_pause(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    const tms_api_t *api = tms_py_api(module);
    tms_selection_t selection = {0};
    running_call_t running = {0};
    tms_error_t error;

    if (!tms_py_get_pause("check_pause", arguments, positional, keywords, &selection, &running.callers)) return NULL;
    running.callers.progress = NULL; /* nothing is copied */
    begin(&selection, &running, &error);
    if (!end(&selection, &running, api->check_pause(&selection, &error), &error)) return NULL;
    Py_RETURN_NONE;
}

PyObject *tms_py_resume(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    const tms_api_t *api = tms_py_api(module);
    tms_selection_t selection = {0};
    running_call_t running = {0};
    tms_report_t report;
    tms_error_t error;

    if (!tms_py_get_resume("resume", arguments, positional, keywords, &selection, &running.callers)) return NULL;
    begin(&selection, &running, &error);
    if (!end(&selection, &running, api->resume(&selection, &report, &error), &error)) return NULL;
    return tms_py_report(module, &report);
}

static PyObject *list_of(const uint64_t *counts, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (size_t index = 0; list && index < count; index++) {
        PyObject *number =
            counts[index] == TMS_NOT_RESIDENT ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(counts[index]);
        if (!number || PyList_SetItem(list, (Py_ssize_t)index, number) < 0) Py_CLEAR(list);
    }
    return list;
}

PyObject *tms_py_read_backup(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {
        "read_backup", 4, 5, {"address", "size", "destination", "stream", "interruptible"}};
    const tms_api_t *api = tms_py_api(module);
    tms_selection_t selection = {0};
    running_call_t running = {0};
    uint64_t address, bytes, destination;
    int32_t found = 0;
    tms_py_call_t call;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_u64(&call, 0, &address) ||
        !tms_py_get_u64(&call, 1, &bytes) || !tms_py_get_u64(&call, 2, &destination) ||
        !tms_py_get_stream(&call, 3, &selection) || !tms_py_get_bool(&call, 4, &running.callers.signals))
        return NULL;
    begin(&selection, &running, &error);
    if (!end(&selection, &running,
             api->read_backup(&selection, address, bytes, (void *)(uintptr_t)destination, &found, &error), &error))
        return NULL;
    return PyBool_FromLong(found);
}

PyObject *tms_py_count_guard_bytes(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"count_guard_bytes", 3, 4, {"tags", "stream", "ranges", "interruptible"}};
    const tms_api_t *api = tms_py_api(module);
    const tms_live_range_t *ranges;
    tms_selection_t selection = {0};
    running_call_t running = {0};
    uint64_t *counts;
    PyObject *list = NULL;
    size_t count = 0;
    tms_py_call_t call;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_stream(&call, 1, &selection) ||
        !tms_py_get_bool(&call, 3, &running.callers.signals))
        return NULL;
    ranges = (const tms_live_range_t *)(const void *)tms_py_numbers(call.values[2], 2, "count_guard_bytes(): ranges must be",
                                                                    &count);
    if (!ranges) return NULL;
    if (!are_sorted(ranges, count)) {
        PyErr_SetString(PyExc_ValueError, "count_guard_bytes(): ranges must be in order, and not overlap");
        return NULL;
    }
    if (!tms_py_get_tags(&call, 0, &selection)) return NULL;
    counts = PyMem_Calloc(count + 1, sizeof *counts);
    if (!counts) {
        PyMem_Free((void *)selection.tags);
        return PyErr_NoMemory();
    }
    begin(&selection, &running, &error);
    if (end(&selection, &running, api->count_guard_bytes(&selection, ranges, count, counts, &error), &error))
        list = list_of(counts, count);
    PyMem_Free(counts);
    return list;
}

static const tms_shared_piece_t *get_pieces(const tms_py_call_t *call, const char *rule, size_t *count) {
    _Static_assert(sizeof(tms_shared_piece_t) == 3 * sizeof(uint64_t), "three numbers are a piece");
    return (const tms_shared_piece_t *)(const void *)tms_py_numbers(call->values[0], 3, rule, count);
}

PyObject *tms_py_publish(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"publish", 4, 5, {"pieces", "name", "contents", "stream", "interruptible"}};
    const tms_api_t *api = tms_py_api(module);
    const tms_shared_piece_t *pieces;
    tms_selection_t selection = {0};
    running_call_t running = {0};
    const char *name, *contents;
    size_t count = 0;
    uint64_t written = 0;
    tms_py_call_t call;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_tag(&call, 1, &name) ||
        !tms_py_get_tag(&call, 2, &contents) || !tms_py_get_stream(&call, 3, &selection) ||
        !tms_py_get_bool(&call, 4, &running.callers.signals))
        return NULL;
    pieces = get_pieces(&call, "publish(): pieces must be", &count);
    if (!pieces) return NULL;
    begin(&selection, &running, &error);
    if (!end(&selection, &running, api->publish(&selection, pieces, count, name, contents, &written, &error), &error))
        return NULL;
    return PyLong_FromUnsignedLongLong(written);
}

PyObject *tms_py_adopt(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"adopt", 3, 4, {"pieces", "names", "stream", "interruptible"}};
    const tms_api_t *api = tms_py_api(module);
    const tms_shared_piece_t *pieces;
    tms_selection_t selection = {0};
    running_call_t running = {0};
    const char *names;
    size_t count = 0, missing = 0;
    tms_py_call_t call;
    tms_error_t error;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_tag(&call, 1, &names) ||
        !tms_py_get_stream(&call, 2, &selection) || !tms_py_get_bool(&call, 3, &running.callers.signals))
        return NULL;
    pieces = get_pieces(&call, "adopt(): pieces must be", &count);
    if (!pieces) return NULL;
    if (strlen(names) != count * TMS_OBJECT_NAME_DIGITS || strspn(names, "0123456789abcdef") != strlen(names)) {
        PyErr_SetString(PyExc_ValueError, "adopt(): names must be 32 hexadecimal digits for each piece");
        return NULL;
    }
    begin(&selection, &running, &error);
    if (!end(&selection, &running, api->adopt(&selection, pieces, count, names, &missing, &error), &error)) return NULL;
    if (missing == count) Py_RETURN_NONE;
    return PyLong_FromSize_t(missing);
}
