#include "device/capture.h"

/* Identifies the calling thread for its lifetime. */
static uintptr_t this_thread(void) {
    static _Thread_local char own;
    return (uintptr_t)&own;
}

void tms_capture_init(tms_capture_t *capture) {
    atomic_init(&capture->visible, 0);
    capture->last_identity = 0;
}

/* Appends an empty entry. NULL, with TMS_INVALID_STATE in *error, if the table is full. */
static tms_capture_entry_t *add(tms_capture_t *capture, const tms_error_context_t *context, tms_error_t *error) {
    int count = tms_capture_visible(capture);
    if (count == TMS_CAPTURE_MAX_NESTED) {
        tms_error_set(error, TMS_INVALID_STATE, context,
                      "%d stream captures are under way already, which is the maximum; end one first", count);
        return NULL;
    }
    capture->entries[count] = (tms_capture_entry_t){.thread = this_thread()};
    atomic_store(&capture->visible, count + 1);
    return &capture->entries[count];
}

static void remove_entry(tms_capture_t *capture, int index) {
    int count = tms_capture_visible(capture) - 1;
    for (int i = index; i < count; i++) capture->entries[i] = capture->entries[i + 1];
    atomic_store(&capture->visible, count);
}

tms_status_t tms_capture_begin(tms_capture_t *capture, const tms_region_t *region, uint64_t *identity,
                               const tms_error_context_t *context, tms_error_t *error) {
    tms_capture_entry_t *entry = add(capture, context, error);
    if (!entry) return TMS_INVALID_STATE;
    if (region) entry->settings = *region;
    *identity = entry->announced = ++capture->last_identity;
    return TMS_OK;
}

/* Returns the last announcement of this thread whose capture has not begun yet, or NULL. */
static tms_capture_entry_t *find_announced(tms_capture_t *capture) {
    for (int i = tms_capture_visible(capture); i-- > 0;) {
        tms_capture_entry_t *entry = &capture->entries[i];
        if (entry->announced && !entry->begun && entry->thread == this_thread()) return entry;
    }
    return NULL;
}

/* Returns the entry whose begin has this identity, or NULL. */
static tms_capture_entry_t *find_begun(tms_capture_t *capture, uint64_t identity) {
    for (int i = tms_capture_visible(capture); identity && i-- > 0;) {
        if (capture->entries[i].begun == identity) return &capture->entries[i];
    }
    return NULL;
}

tms_status_t tms_capture_begin_on(tms_capture_t *capture, const tms_capture_stream_t *where, uint64_t *identity, bool *known,
                                  const tms_error_context_t *context, tms_error_t *error) {
    tms_capture_entry_t *entry = find_begun(capture, tms_capture_find(capture, where->key));
    *known = entry != NULL;
    if (entry) {
        entry->beginner = this_thread();
        *identity = entry->begun;
        return TMS_OK;
    }
    entry = find_announced(capture);
    if (!entry) entry = add(capture, context, error);
    if (!entry) return TMS_INVALID_STATE;
    entry->where = *where;
    entry->beginner = this_thread();
    *identity = entry->begun = ++capture->last_identity;
    return TMS_OK;
}

void tms_capture_note_begin(tms_capture_t *capture, uint64_t identity) {
    tms_capture_entry_t *entry = find_begun(capture, identity);
    if (entry) entry->beginner = 0;
}

bool tms_capture_end(tms_capture_t *capture, uint64_t identity) {
    for (int i = tms_capture_visible(capture); identity && i-- > 0;) {
        tms_capture_entry_t *entry = &capture->entries[i];
        if (entry->announced != identity && entry->begun != identity) continue;
        if (entry->announced == identity) {
            entry->announced = 0;
            entry->settings = (tms_region_t){.managed = false};
        } else {
            entry->begun = 0;
        }
        if (!entry->announced && !entry->begun) remove_entry(capture, i);
        return true;
    }
    return false;
}

bool tms_capture_end_last(tms_capture_t *capture) {
    int count = tms_capture_visible(capture);
    for (int i = count; i-- > 0;) {
        if (capture->entries[i].announced) return tms_capture_end(capture, capture->entries[i].announced);
    }
    return count > 0 && tms_capture_end(capture, capture->entries[count - 1].begun);
}

uint64_t tms_capture_find(const tms_capture_t *capture, uintptr_t key) {
    for (int i = tms_capture_visible(capture); i-- > 0;) {
        if (capture->entries[i].begun && capture->entries[i].where.key == key) return capture->entries[i].begun;
    }
    return 0;
}

int tms_capture_drop(tms_capture_t *capture, bool (*ended)(void *context, const tms_capture_stream_t *where),
                     void *context) {
    int dropped = 0;
    for (int i = tms_capture_visible(capture); i-- > 0;) {
        const tms_capture_entry_t *entry = &capture->entries[i];
        /* If `beginner` is this thread, its begin has returned without tms_capture_note_begin. */
        bool may_be_queried = entry->begun && (!entry->beginner || entry->beginner == this_thread());
        if (!may_be_queried || !ended(context, &entry->where)) continue;
        remove_entry(capture, i);
        dropped++;
    }
    return dropped;
}

bool tms_capture_settings(const tms_capture_t *capture, tms_region_t *region) {
    for (int i = tms_capture_visible(capture); i-- > 0;) {
        if (!capture->entries[i].settings.managed) continue;
        *region = capture->entries[i].settings;
        return true;
    }
    return false;
}
