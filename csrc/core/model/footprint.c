#include "core/model/footprint.h"

#include <string.h>

#include "base/hash.h"

static bool are_told(const tms_footprints_t *to) {
    return tms_events_are_on(to->events) || tms_shared_page_is_open(to->page);
}

static tms_told_t state_of(const tms_footprints_t *to, const tms_segment_t *segment) {
    const uint64_t bytes = tms_segment_reserved(segment);
    const bool settled = tms_segment_is_settled(segment);
    return (tms_told_t){.holds = {.resident_bytes = tms_segment_is_mapped(segment) ? bytes : 0,
                                  .paused_bytes = segment->state == TMS_SEGMENT_PAUSED ? bytes : 0,
                                  .backup_bytes = settled ? tms_backup_taken_bytes(&segment->backup, to->stores) : 0},
                        .disk_backup_bytes =
                            settled ? tms_backup_taken_bytes_of(&segment->backup, to->stores, TMS_BACKUP_DISK) : 0,
                        .damaged = segment->state == TMS_SEGMENT_DAMAGED || segment->state == TMS_SEGMENT_REPAIRING,
                        .row = segment->told.row};
}

/* Tells the page the change since the segment was last told, notes the new state, and returns the change. */
static tms_footprint_t tell(const tms_footprints_t *to, tms_segment_t *segment, tms_told_t now) {
    const tms_told_t before = segment->told;
    const tms_footprint_t change = {.resident_bytes = now.holds.resident_bytes - before.holds.resident_bytes,
                                    .paused_bytes = now.holds.paused_bytes - before.holds.paused_bytes,
                                    .backup_bytes = now.holds.backup_bytes - before.holds.backup_bytes};
    const uint64_t disk = now.disk_backup_bytes - before.disk_backup_bytes;
    segment->told = now;
    tms_shared_page_change(to->page, now.row,
                           &(tms_shared_page_change_t){.resident_bytes = change.resident_bytes,
                                                       .paused_bytes = change.paused_bytes,
                                                       .host_backup_bytes = change.backup_bytes - disk,
                                                       .disk_backup_bytes = disk,
                                                       .damaged = (uint64_t)now.damaged - (uint64_t)before.damaged});
    return change;
}

static void record(const tms_footprints_t *to, const tms_segment_t *segment, tms_footprint_t change, tms_event_t event) {
    event.tag = segment->tag->name;
    event.device = segment->device;
    event.address = tms_segment_address(segment);
    event.change = change;
    tms_events_record(to->events, event);
}

void tms_footprint_record(const tms_footprints_t *to, tms_segment_t *segment, tms_event_t event) {
    if (!are_told(to)) return;
    if (event.kind == TMS_EVENT_ALLOCATE) {
        segment->told.row = tms_shared_page_row(to->page, segment->tag, segment->device);
        tms_shared_page_add_allocation(to->page, segment->told.row);
    }
    record(to, segment, tell(to, segment, state_of(to, segment)), event);
}

void tms_footprint_record_free(const tms_footprints_t *to, tms_segment_t *segment) {
    if (!are_told(to)) return;
    const tms_told_t nothing = {.row = segment->told.row};
    record(to, segment, tell(to, segment, nothing), (tms_event_t){.kind = TMS_EVENT_FREE, .bytes = segment->bytes});
    tms_shared_page_remove_allocation(to->page, segment->told.row);
}

/* ---- the changes of a call ---- */

static bool is_nothing(tms_footprint_t change) {
    return change.resident_bytes == 0 && change.paused_bytes == 0 && change.backup_bytes == 0;
}

static void empty(tms_footprint_moves_t *moves, size_t slot) {
    if (!moves->slots[slot].tag) return;
    if (!is_nothing(moves->slots[slot].change))
        tms_events_record(moves->to->events, (tms_event_t){.kind = TMS_EVENT_MOVE,
                                                           .call = moves->call,
                                                           .operation = moves->operation,
                                                           .allocations = moves->slots[slot].allocations,
                                                           .change = moves->slots[slot].change,
                                                           .tag = moves->slots[slot].tag->name,
                                                           .device = moves->slots[slot].device});
    moves->slots[slot].tag = NULL;
}

/* The slot of a tag and device, or an empty one; one to empty, if all are full. */
static size_t find_slot(const tms_footprint_moves_t *moves, const tms_segment_t *segment) {
    const size_t first = (size_t)(tms_hash_number(segment->tag->hash, (uint64_t)segment->device) % TMS_FOOTPRINT_SLOTS);
    for (size_t i = 0; i < TMS_FOOTPRINT_SLOTS; i++) {
        const size_t slot = (first + i) % TMS_FOOTPRINT_SLOTS;
        if (!moves->slots[slot].tag) return slot;
        if (moves->slots[slot].tag == segment->tag && moves->slots[slot].device == segment->device) return slot;
    }
    return first;
}

void tms_footprint_move(tms_footprint_moves_t *moves, tms_segment_t *segment) {
    if (!are_told(moves->to)) return;
    const size_t slot = find_slot(moves, segment);
    const tms_footprint_t change = tell(moves->to, segment, state_of(moves->to, segment));
    tms_shared_page_count(moves->to->page, segment->told.row, &moves->outcome);
    if (moves->slots[slot].tag != segment->tag || moves->slots[slot].device != segment->device) {
        empty(moves, slot);
        moves->slots[slot].tag = segment->tag;
        moves->slots[slot].device = segment->device;
        moves->slots[slot].allocations = 0;
        moves->slots[slot].change = (tms_footprint_t){.resident_bytes = 0};
    }
    moves->slots[slot].allocations++;
    moves->slots[slot].change.resident_bytes += change.resident_bytes;
    moves->slots[slot].change.paused_bytes += change.paused_bytes;
    moves->slots[slot].change.backup_bytes += change.backup_bytes;
}

void tms_footprint_record_moves(tms_footprint_moves_t *moves) {
    if (!tms_events_are_on(moves->to->events)) return;
    for (size_t slot = 0; slot < TMS_FOOTPRINT_SLOTS; slot++) empty(moves, slot);
}

/* ---- the shared page is made ---- */

_Static_assert(sizeof(CUuuid) == TMS_SHARED_PAGE_UUID_WORDS * sizeof(uint64_t), "a UUID fits its words");
_Static_assert((int)TMS_MAX_DEVICES <= (int)TMS_SHARED_PAGE_DEVICES, "the page has a place for each device");

/* What is not known stays 0. */
static void describe(const tms_driver_table_t *driver, const tms_device_table_t *devices,
                     tms_shared_page_description_t *description) {
    memset(description, 0, sizeof(*description));
    description->device_count = devices->count;
    for (int i = 0; i < devices->count; i++) {
        CUuuid uuid;
        description->devices[i].total_bytes = devices->device[i].total_bytes;
        if (driver->cuDeviceGetUuid && driver->cuDeviceGetUuid(&uuid, devices->device[i].handle) == CUDA_SUCCESS)
            memcpy(description->devices[i].uuid, &uuid, sizeof(uuid));
    }
}

void tms_footprint_open_page(tms_shared_page_t *page, const tms_log_t *log, const tms_driver_table_t *driver,
                             const tms_device_table_t *devices) {
    tms_shared_page_description_t description;
    tms_private_directory_failure_t failure;
    if (!tms_shared_page_may_open(page)) return;
    describe(driver, devices, &description);
    if (tms_shared_page_open(page, &description, &failure)) return;
    char reason[TMS_ERROR_NAME_BYTES];
    tms_log_write(log, TMS_LOG_WARNING,
                  "this process is not shown by `top`: its page '%s' cannot be made: %s failed with errno %d (%s). Nothing "
                  "else depends on it. TMS_SHARED_PAGE names another directory, and TMS_SHARED_PAGE=0 turns the page off",
                  page->file.path, failure.call, failure.os_error, strerror_r(failure.os_error, reason, sizeof(reason)));
}
