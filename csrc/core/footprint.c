#include "core/footprint.h"

#include "base/hash.h"

static tms_footprint_t footprint_of(const tms_backup_stores_t *stores, const tms_segment_t *segment) {
    const uint64_t bytes = tms_segment_reserved(segment);
    return (tms_footprint_t){
        .resident_bytes = segment->mapped ? bytes : 0,
        .paused_bytes = segment->state == TMS_SEGMENT_PAUSED ? bytes : 0,
        .backup_bytes = tms_segment_is_settled(segment) ? tms_backup_taken_bytes(&segment->backup, stores) : 0,
    };
}

/* Returns the change since the segment's last event, and notes the new footprint. */
static tms_footprint_t tell(tms_segment_t *segment, tms_footprint_t now) {
    const tms_footprint_t before = segment->told;
    segment->told = now;
    return (tms_footprint_t){.resident_bytes = now.resident_bytes - before.resident_bytes,
                             .paused_bytes = now.paused_bytes - before.paused_bytes,
                             .backup_bytes = now.backup_bytes - before.backup_bytes};
}

static void record(tms_events_t *events, const tms_segment_t *segment, tms_footprint_t change, tms_event_t event) {
    event.tag = segment->tag->name;
    event.device = segment->device;
    event.address = tms_segment_address(segment);
    event.change = change;
    tms_events_record(events, event);
}

void tms_footprint_record(tms_events_t *events, const tms_backup_stores_t *stores, tms_segment_t *segment,
                          tms_event_t event) {
    if (!tms_events_are_on(events)) return;
    record(events, segment, tell(segment, footprint_of(stores, segment)), event);
}

void tms_footprint_record_free(tms_events_t *events, tms_segment_t *segment) {
    if (!tms_events_are_on(events)) return;
    const tms_footprint_t nothing = {.resident_bytes = 0};
    record(events, segment, tell(segment, nothing), (tms_event_t){.kind = TMS_EVENT_FREE, .bytes = segment->bytes});
}

/* ---- the changes of a call ---- */

static bool is_nothing(tms_footprint_t change) {
    return change.resident_bytes == 0 && change.paused_bytes == 0 && change.backup_bytes == 0;
}

static void empty(tms_footprint_moves_t *moves, size_t slot) {
    if (!moves->slots[slot].tag) return;
    if (!is_nothing(moves->slots[slot].change))
        tms_events_record(moves->events, (tms_event_t){.kind = TMS_EVENT_MOVE,
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
    if (!tms_events_are_on(moves->events)) return;
    const size_t slot = find_slot(moves, segment);
    const tms_footprint_t change = tell(segment, footprint_of(moves->stores, segment));
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
    if (!tms_events_are_on(moves->events)) return;
    for (size_t slot = 0; slot < TMS_FOOTPRINT_SLOTS; slot++) empty(moves, slot);
}
