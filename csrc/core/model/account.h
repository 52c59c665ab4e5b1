/* The one account of what segments hold: resident memory, paused addresses, backups by store, and damage.
 *
 * A segment's state changes only here. The new amounts are compared with the amounts when the segment was last counted, and
 * the difference is added to every total at once: the totals of the process, of the device and of the tag, the row of the
 * shared page, and the change of an event. So the totals always agree, the changes of all events add up to what is held
 * after them, and a new total needs one line in one function. Memory that a failed call has mapped and unmapped again is in
 * no peak, because nothing is counted before a call ends.
 *
 * Every function needs the saver's lock, unless its comment says otherwise, and makes no driver call. The totals may be read
 * at any time on any thread. The shared page is published by the caller, once at the end of its change. A call that moves
 * thousands of segments records one event for each tag and device, as long as these are not more than TMS_ACCOUNT_SLOTS;
 * beyond that a pair may have several. Nothing is allocated. */
#ifndef TMS_ACCOUNT_H
#define TMS_ACCOUNT_H

#include "backup/stores.h"
#include "base/events.h"
#include "base/log.h"
#include "core/model/run.h"
#include "device/device.h"

enum { TMS_ACCOUNT_SLOTS = 64 };

/* Part of the saver. */
typedef struct tms_account {
    tms_gauge_t mapped;
    tms_gauge_t by_device[TMS_MAX_DEVICES];  /* the part of `mapped` on each device; the part of each tag is in the tag */
    _Atomic uint64_t slack[TMS_MAX_DEVICES]; /* slack of runs, which is in no other total; written by kinds.c */
    _Atomic uint64_t paused_bytes;
    uint64_t damaged; /* number of segments that are DAMAGED or REPAIRING */
    tms_events_t *events;
    tms_shared_page_t *shared_page;
    const tms_backup_stores_t *stores; /* the stores, which know how many bytes a backup takes */
} tms_account_t;

/* Makes a new segment ACTIVE, counts it with its memory, and records its event. */
void tms_account_publish(tms_account_t *account, tms_segment_t *segment);
/* Gives a segment to a call. The memory that the segment holds does not change. `state` is PAUSING, RESUMING or
 * REPAIRING. */
void tms_account_own(tms_segment_t *segment, tms_segment_state_t state);
/* Changes the state of one segment, and records `event` with its tag, device, address and change. */
void tms_account_settle(tms_account_t *account, tms_segment_t *segment, tms_segment_state_t state, tms_event_t event);
/* Counts a segment that leaves the registry, and that holds nothing from now on. Records its event. */
void tms_account_remove(tms_account_t *account, tms_segment_t *segment);
/* Sets the peaks of the process and of the devices to what is mapped now. tms_tag_reset_peaks does the same for the tags. */
void tms_account_reset_peaks(tms_account_t *account);

/* The changes of one call, by tag and device. The owner sets the members before `slots`, and sets `slots` to 0. */
typedef struct tms_account_moves {
    tms_account_t *account;
    uint64_t call;
    const char *operation;
    double now;                        /* tms_wait_now */
    tms_shared_page_outcome_t outcome; /* the outcome for the shared page's rows */
    struct {
        const tms_tag_t *tag; /* NULL: empty */
        int device;
        uint64_t allocations;
        tms_footprint_t change;
    } slots[TMS_ACCOUNT_SLOTS];
} tms_account_moves_t;

/* Changes the state of a segment of the call. */
void tms_account_move(tms_account_moves_t *moves, tms_segment_t *segment, tms_segment_state_t state);
/* Counts a segment whose backup the call has changed, but not its state. */
void tms_account_recount(tms_account_moves_t *moves, tms_segment_t *segment);
/* Records all changes so far. Called before another event of one of the segments is recorded. */
void tms_account_record_moves(tms_account_moves_t *moves);

/* Makes the shared page, at the first allocation of a process. Called on the allocating thread, with no lock held. Asks the
 * driver for the UUIDs of the devices, then makes the file. A failure is logged once, and changes nothing else. Costs one
 * load once it is made, or cannot be made. */
void tms_account_open_page(tms_account_t *account, const tms_log_t *log, const tms_driver_table_t *driver,
                           const tms_device_table_t *devices);

#endif
