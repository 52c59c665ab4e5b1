/* The functions of the table that report what is managed (allocations, usage, tags, counters, events), and those of the
 * contents of memory.
 *
 * None of them makes a driver call, except export_memory, count_guard_bytes, publish and adopt. Each takes the lock of the
 * module that it queries. Without a state nothing is managed. */

#include "abi/entries.h"

#include <string.h>

#include "abi/start.h"
#include "core/model/export.h"
#include "core/model/inspect.h"
#include "core/transition/adopt.h"
#include "core/transition/guard_bytes.h"
#include "core/transition/publish.h"
#include "core/transition/read_backup.h"

size_t tms_api_segments(tms_segment_info_t *rows, size_t capacity) {
    tms_state_t *state = tms_state_if_made();
    return state ? tms_inspect_segments(&state->saver, rows, capacity) : 0;
}

size_t tms_api_usage(const char *tag, int32_t device, tms_usage_info_t *rows, size_t capacity) {
    tms_state_t *state = tms_state_if_made();
    return state ? tms_inspect_usage(&state->saver, tag, device, rows, capacity) : 0;
}

void tms_api_reset_peaks(void) {
    tms_state_t *state = tms_state_if_made();
    if (state) tms_inspect_reset_peaks(&state->saver);
}

tms_status_t tms_api_find(uint64_t address, uint64_t bytes, tms_segment_info_t *row) {
    tms_state_t *state = tms_state_if_made();
    return state ? tms_inspect_find(&state->saver, address, bytes, row) : TMS_NOT_MANAGED;
}

tms_status_t tms_api_export_memory(uint64_t address, tms_export_t *exported, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_export_memory(&state->saver, address, exported, error) : TMS_OUT_OF_HOST_MEMORY;
}

void tms_api_tag_info(const char *tag, tms_tag_info_t *info) {
    tms_state_t *state = tms_state_if_made();
    tms_tag_t *found = state ? tms_tag_find(&state->regions.tags, tag) : NULL;
    *info = (tms_tag_info_t){0};
    if (!found) return;
    info->paused = atomic_load(&found->paused);
    info->pause_epoch = atomic_load(&found->pause_epoch);
    info->discards = atomic_load(&found->discards);
}

tms_status_t tms_api_read_backup(const tms_selection_t *selection, uint64_t address, uint64_t bytes, void *destination,
                                 int32_t *found, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_read_backup_perform(&state->saver, selection, address, bytes, destination, found, error)
                 : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_count_guard_bytes(const tms_selection_t *selection, const tms_live_range_t *ranges, size_t range_count,
                                       uint64_t *counts, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_guard_bytes_count(&state->saver, selection, ranges, range_count, counts, error)
                 : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_publish(const tms_selection_t *selection, const tms_shared_piece_t *pieces, size_t count,
                             const char *name, const char *contents, uint64_t *written, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_publish_perform(&state->saver, selection, pieces, count, name, contents, written, error)
                 : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_adopt(const tms_selection_t *selection, const tms_shared_piece_t *pieces, size_t count,
                           const char *names, size_t *missing, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_adopt_perform(&state->saver, selection, pieces, count, names, missing, error)
                 : TMS_OUT_OF_HOST_MEMORY;
}

size_t tms_api_tags(tms_tag_row_t *rows, size_t capacity) {
    tms_state_t *state = tms_state_if_made();
    return state ? tms_tag_list(&state->regions.tags, rows, capacity) : 0;
}

void tms_api_counters(tms_counters_t *counters) {
    tms_state_t *state = tms_state_if_made();
    memset(counters, 0, sizeof *counters);
    if (!state) return;
    tms_inspect_counters(&state->saver, counters);
    counters->uncounted_allocations_total = tms_ledger_uncounted(&state->ledger);
}

void tms_api_events(tms_events_copy_t *copy) {
    tms_state_t *state = tms_state(NULL);
    if (state)
        tms_inspect_copy_events(&state->saver, copy);
    else
        copy->event_count = copy->level_count = copy->recorded = copy->capacity = 0;
}

void tms_api_set_event_samples(int32_t on) {
    tms_state_t *state = tms_state(NULL);
    if (state) tms_events_set_samples(&state->saver.events, on != 0);
}

size_t tms_api_libraries(tms_library_info_t *rows, size_t capacity) {
    tms_state_t *state = tms_state_if_made();
    return state ? tms_ledger_rows(&state->ledger, rows, capacity) : 0;
}
