/* The events, and whether the free memory of devices is among them. Only the switch keeps the GIL. */
#include <stddef.h>
#include <stdlib.h>

#include "convert.h"
#include "functions.h"
#include "module_state.h"
#include "rows.h"

static void drop(tms_events_copy_t *copy) {
    free(copy->events);
    free(copy->levels);
}

/* Fills the copy, whose arrays the caller drops. False if memory is short. Both numbers may grow between two calls, hence
 * the spare room and the loop; the ring has no more events than its capacity. */
static bool read_events(const tms_api_t *api, tms_events_copy_t *copy) {
    enum { ROOM_TO_SPARE = 16 };
    *copy = (tms_events_copy_t){.event_room = 0};
    api->events(copy);
    for (;;) {
        const size_t events = copy->recorded < copy->capacity ? (size_t)copy->recorded : (size_t)copy->capacity;
        const size_t levels = copy->level_count;
        if (copy->events && events <= copy->event_room && levels <= copy->level_room) return true;
        drop(copy);
        copy->event_room = events + ROOM_TO_SPARE;
        copy->level_room = levels + ROOM_TO_SPARE;
        copy->events = calloc(copy->event_room, sizeof(*copy->events));
        copy->levels = calloc(copy->level_room, sizeof(*copy->levels));
        if (!copy->events || !copy->levels) return false;
        api->events(copy);
    }
}

PyObject *tms_py_events(PyObject *module, PyObject *unused) {
    const tms_api_t *api = tms_py_api(module);
    PyObject *events, *levels;
    tms_events_copy_t copy;
    bool complete;

    (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    complete = read_events(api, &copy);
    Py_END_ALLOW_THREADS;
    if (!complete) {
        drop(&copy);
        return PyErr_NoMemory();
    }
    events = PyList_New((Py_ssize_t)copy.event_count);
    for (size_t index = 0; events && index < copy.event_count; index++) {
        PyObject *row = tms_py_event(module, &copy.events[index]);
        if (!row || PyList_SetItem(events, (Py_ssize_t)index, row) < 0) Py_CLEAR(events);
    }
    levels = events ? PyList_New((Py_ssize_t)copy.level_count) : NULL;
    for (size_t index = 0; levels && index < copy.level_count; index++) {
        PyObject *row = tms_py_event_level(module, &copy.levels[index]);
        if (!row || PyList_SetItem(levels, (Py_ssize_t)index, row) < 0) Py_CLEAR(levels);
    }
    drop(&copy);
    if (!events || !levels) {
        Py_XDECREF(events);
        return NULL;
    }
    return tms_py_events_copy(module, events, levels, copy.recorded, copy.capacity);
}

PyObject *tms_py_set_event_samples(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords) {
    static const tms_py_signature_t signature = {"set_event_samples", 1, 1, {"on"}};
    tms_py_call_t call;
    bool on = false;

    if (!tms_py_bind(&call, &signature, arguments, positional, keywords) || !tms_py_get_bool(&call, 0, &on)) return NULL;
    tms_py_api(module)->set_event_samples(on);
    Py_RETURN_NONE;
}
