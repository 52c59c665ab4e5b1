/* What segments hold, as the events tell it: each change of a footprint is an event, and what a segment holds after its last
 * event is kept in it (`segment->told`). So the changes of all events and what is held after them always add up.
 *
 * Every function needs the saver's lock and makes no call of the driver. With the ring off they do nothing. A call that
 * moves thousands of segments records one event for each tag and device, as long as these are not more than
 * TMS_FOOTPRINT_SLOTS; beyond that a pair may have several. Nothing is allocated. */
#ifndef TMS_FOOTPRINT_H
#define TMS_FOOTPRINT_H

#include "backup/stores.h"
#include "base/events.h"
#include "core/segment.h"

enum { TMS_FOOTPRINT_SLOTS = 64 };

/* Records the event of one segment, with its tag, device, address and change. The segment has its new state. */
void tms_footprint_record(tms_events_t *events, const tms_backup_stores_t *stores, tms_segment_t *segment,
                          tms_event_t event);
/* Records that the segment is freed. It holds nothing from now on. */
void tms_footprint_record_free(tms_events_t *events, tms_segment_t *segment);

/* The changes of one call, by tag and device. The first four are set by the owner, the rest is 0. */
typedef struct tms_footprint_moves {
    tms_events_t *events;
    const tms_backup_stores_t *stores;
    uint64_t call;
    const char *operation;
    struct {
        const tms_tag_t *tag; /* NULL: empty */
        int device;
        uint64_t allocations;
        tms_footprint_t change;
    } slots[TMS_FOOTPRINT_SLOTS];
} tms_footprint_moves_t;

/* Adds a segment, which has its new state. */
void tms_footprint_move(tms_footprint_moves_t *moves, tms_segment_t *segment);
/* Records all that was added and changed, before the lock is released, and before another event of one of the segments. */
void tms_footprint_record_moves(tms_footprint_moves_t *moves);

#endif
