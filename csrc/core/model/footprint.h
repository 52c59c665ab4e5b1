/* What segments hold, as it is told to those outside: in the events, and in the shared page of the process. Each change of a
 * footprint is an event and a change of the page's row; what a segment holds after it is kept in the segment
 * (`segment->told`). So the changes of all events and what is held after them always add up, and the page always shows the
 * sum over all segments.
 *
 * Every function needs the saver's lock and makes no call of the driver. What is off (the ring, the page) is told nothing;
 * with both off they do nothing. A call that moves thousands of segments records one event for each tag and device, as long
 * as these are not more than TMS_FOOTPRINT_SLOTS; beyond that a pair may have several. Nothing is allocated.
 *
 * The page is published by the caller, once at the end of its change. */
#ifndef TMS_FOOTPRINT_H
#define TMS_FOOTPRINT_H

#include "backup/stores.h"
#include "base/events.h"
#include "base/log.h"
#include "core/model/run.h"
#include "device/device.h"

enum { TMS_FOOTPRINT_SLOTS = 64 };

/* Who is told, and the stores, which know what a backup takes. Part of the saver. */
typedef struct tms_footprints {
    tms_events_t *events;
    tms_shared_page_t *page;
    const tms_backup_stores_t *stores;
} tms_footprints_t;

/* Records the event of one segment, with its tag, device, address and change. The segment has its new state. */
void tms_footprint_record(const tms_footprints_t *to, tms_segment_t *segment, tms_event_t event);
/* Records that the segment is freed. It holds nothing from now on. */
void tms_footprint_record_free(const tms_footprints_t *to, tms_segment_t *segment);

/* The changes of one call, by tag and device. The first four are set by the owner, the rest is 0. */
typedef struct tms_footprint_moves {
    const tms_footprints_t *to;
    uint64_t call;
    const char *operation;
    tms_shared_page_outcome_t outcome; /* for the page's rows */
    struct {
        const tms_tag_t *tag; /* NULL: empty */
        int device;
        uint64_t allocations;
        tms_footprint_t change;
    } slots[TMS_FOOTPRINT_SLOTS];
} tms_footprint_moves_t;

/* Adds a segment, which has its new state. */
void tms_footprint_move(tms_footprint_moves_t *moves, tms_segment_t *segment);
/* Records all that was added and changed, before another event of one of the segments. */
void tms_footprint_record_moves(tms_footprint_moves_t *moves);

/* The shared page is made at the first allocation of a process. On the allocating thread, with no lock held: asks the driver
 * for the UUIDs of the devices, then makes the file. A failure is logged once, and changes nothing else. Costs one load once
 * the page is made, or cannot be made. */
void tms_footprint_open_page(tms_shared_page_t *page, const tms_log_t *log, const tms_driver_table_t *driver,
                             const tms_device_table_t *devices);

#endif
