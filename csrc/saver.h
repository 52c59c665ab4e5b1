/* The saver: every managed allocation of the process, and allocate and free as transactions.
 *
 * saver.c has allocate and free, peers.c access for peers, reclaim.c what waits to be given back, inspect.c the queries.
 * The saver owns the registry, the segments and their states, and the deferred frees; `lock` guards all of that. It also
 * owns the quarantine and the devices' locks, which have locks of their own, leaves below this one. It is held for look-ups
 * and state changes, and while access for peers is granted or streams are asked whether they capture (both rare and
 * short); never across dlopen, a wait for the device, a copy, or the creation or release of physical memory. Callers may
 * hold torch's allocator mutex and the GIL; no thread may call either with `lock` held.
 *
 * A segment in PAUSING or RESUMING belongs to the call that put it there (transition.h), which touches it without the lock.
 * Frees of such a segment only set `free_requested`. At most one transition runs at a time; a second call waits for its turn
 * on `turn`, which costs nobody but that caller. */
#ifndef TMS_SAVER_H
#define TMS_SAVER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "capture.h"
#include "device_lock.h"
#include "pending.h"
#include "segment.h"
#include "stats.h"

/* Looks for devices that have come into use and have no access to what was allocated before (peers.c). */
typedef struct tms_peer_looks {
    tms_device_mask_t complete; /* all ACTIVE segments are accessible to these, as far as they can be */
    tms_device_mask_t seen;     /* in use at the last look, which may have failed for some segment */
    uint32_t left_out, pause;   /* allocations since a look that failed, and how many of them do not look again */
} tms_peer_looks_t;

/* How long the begin of a capture waits for a callback of a pause or resume: far more than one takes that can run. */
#define TMS_CALLBACK_PATIENCE_SECONDS 5.0

typedef struct tms_saver {
    const tms_config_t *config;
    const tms_log_t *log;
    tms_devices_t *devices;
    tms_region_defaults_t *regions;
    tms_backup_stores_t stores;

    pthread_mutex_t lock;
    pthread_cond_t turn; /* broadcast when a transition ends */
    bool transition_running;
    double callback_began; /* when the transition under way called back, on tms_wait_now's clock; 0: it is in no callback */
    double callback_patience_seconds; /* TMS_CALLBACK_PATIENCE_SECONDS; tests use less */
    uint64_t marks;                   /* the last that a look of a transition has put on tags */
    uint64_t steps; /* segments and tags that transitions have looked at under the lock; for tests of how that grows */
    tms_registry_t registry;
    tms_capture_t capture;
    tms_segment_t
        *deferred;        /* freed by their owner when their device could not be waited for; mapped; out of the registry */
    tms_registry_t aside; /* freed segments in the quarantine whose address range the driver did not take back */
    tms_quarantine_t quarantine;
    tms_device_locks_t device_locks;
    uint64_t damaged; /* segments in the registry that are DAMAGED */
    tms_peer_looks_t peers;

    tms_pendings_t pendings; /* has its own lock */
    _Atomic uint64_t memory_margin_bytes;
    _Atomic int host_policy; /* tms_host_policy_t, not TMS_HOST_DEFAULT: where neither call nor region says */
    _Atomic bool forked;     /* this process is a forked child: nothing may touch the GPU */
    tms_stats_t stats;
} tms_saver_t;

tms_status_t tms_saver_init(tms_saver_t *saver, const tms_config_t *config, const tms_log_t *log, tms_devices_t *devices,
                            tms_region_defaults_t *regions, tms_error_t *error);
/* For tests: frees every segment, whatever its state, then the rest. No other thread may be in the saver. */
void tms_saver_release(tms_saver_t *saver);

/* tms_api_t.allocate and .free, with the settings given. */
tms_status_t tms_saver_allocate(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device,
                                uint64_t *address, tms_error_t *error);
tms_status_t tms_saver_free(tms_saver_t *saver, uint64_t address, tms_error_t *error);
/* Whether an address is the start of a managed allocation, or lies in one. Takes the lock, calls no driver. */
bool tms_saver_owns(tms_saver_t *saver, uint64_t address);

/* peers.c. tms_api_t.refresh_peers: gives access to devices that have come into use. */
tms_status_t tms_saver_refresh_peers(tms_saver_t *saver, tms_error_t *error);

/* saver_captures.c: tms_api_t.capture_begin, capture_end and the like. A begin waits for a transition that is under way, but
 * not for longer than TMS_CALLBACK_PATIENCE_SECONDS for one of its callbacks, which may need what the caller holds (the
 * GIL): then, and on a thread that is itself inside a transition, it is TMS_INVALID_STATE. `identity` may be NULL. */
tms_status_t tms_saver_capture_begin(tms_saver_t *saver, const tms_region_t *region, uint64_t *identity, tms_error_t *error);
/* A capture is about to begin on this stream; not the legacy one, which cannot be captured. */
typedef struct tms_capture_begun {
    uint64_t identity;   /* 0 where it was not announced */
    bool known;          /* it is that of a capture whose end was not seen */
    bool must_not_begin; /* on failure: a transition under way would break the capture, and the capture that */
} tms_capture_begun_t;
tms_status_t tms_saver_capture_begin_on(tms_saver_t *saver, void *stream, tms_capture_begun_t *begun, tms_error_t *error);
/* The call that was to begin it on the stream has returned: without an error, or with one for what was `known`. From now on
 * the stream is asked. */
void tms_saver_capture_begun(tms_saver_t *saver, uint64_t identity);
/* Ends what has this identity (0: the last one), or began on this stream. The end of the last one finishes the deferred
 * frees. */
bool tms_saver_capture_end(tms_saver_t *saver, uint64_t identity);
void tms_saver_capture_end_on(tms_saver_t *saver, void *stream);
/* For a call that destroys a stream, or (`stream` NULL) the context of a device: before it, what began there is taken out,
 * because a stream that is gone must not be asked; after it `gone` tells what became of it. `taken` has room for
 * TMS_CAPTURE_MAX_NESTED. */
size_t tms_saver_capture_take(tms_saver_t *saver, void *stream, int device, tms_capture_stream_t *taken);
void tms_saver_capture_taken(tms_saver_t *saver, const tms_capture_stream_t *taken, size_t count, bool gone);
/* Whether the stream on which this one began says that it captures. */
bool tms_saver_capture_goes_on(tms_saver_t *saver, uint64_t identity);
/* How many captures are under way. Asks the streams first, and drops those whose capture has ended without our knowing.
 * Holds the lock while it asks, so that no stream is destroyed then. */
int tms_saver_captures(tms_saver_t *saver);
/* Around every callback that a transition makes while it has the turn. */
void tms_saver_callback_begin(tms_saver_t *saver);
void tms_saver_callback_end(tms_saver_t *saver);

/* The settings for an allocation of this thread: its region, else a visible capture's, else the initial ones. */
tms_region_t tms_saver_settings(tms_saver_t *saver);
/* `policy`, or the process's where that is TMS_HOST_DEFAULT. */
tms_host_policy_t tms_saver_host_policy(const tms_saver_t *saver, tms_host_policy_t policy);

/* TMS_FORKED where this process is a forked child. The first thing that every function above does. */
tms_status_t tms_saver_check_process(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error);

/* TMS_INVALID_ARGUMENT where a limit in the environment is malformed. For the calls with which a program begins to use this
 * library: regions, allocations, pauses and resumes. */
tms_status_t tms_saver_check_settings(const tms_saver_t *saver, tms_error_t *error);

/* reclaim.c. For transition.c and saver.c: finishes a free whose owner has gone. The segment is out of the registry and
 * belongs to the callee; takes the lock for bookkeeping only. What the driver refuses goes to the quarantine, with a log
 * line.
 */
void tms_saver_dispose(tms_saver_t *saver, tms_segment_t *segment);
/* The share that a segment resumed with exclusive=True has of its device's lock, once its memory has gone: whoever waits for
 * the lock finds it free. What the driver refused to take back does not keep it, because nobody knows for how long. */
void tms_saver_let_go_of_lock(tms_saver_t *saver, tms_segment_t *segment);
/* tms_saver_dispose for a segment that may be mapped: waits for the devices first. Where that is forbidden (a capture),
 * fails, or is to stop (`wait`, which may be NULL) it is deferred, except on a device that is lost, which runs nothing any
 * more. */
void tms_saver_retire(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait);
/* The range that the driver has just reserved for a segment: whether no other segment of ours has it. Where a segment in the
 * quarantine has it, the driver has taken that back although it said otherwise, and the quarantine gives up its claim. */
tms_status_t tms_saver_claim_range(tms_saver_t *saver, const tms_segment_t *segment, const tms_error_context_t *context,
                                   tms_error_t *error);
/* peers.c, for saver.c and transition.c. The same after an allocation, which stands whatever comes of it: a failure is
 * logged. A look asks the driver about every segment. Where one segment keeps failing 1, 2, 4, ... allocations leave the
 * look out after each that failed; the next pause, resume or explicit call, and every device that comes into use, begin
 * anew. */
void tms_peers_refresh_after_allocation(tms_saver_t *saver);
/* The devices in use as of the last look; takes the lock. */
tms_device_mask_t tms_peers_seen(tms_saver_t *saver);
/* Under the lock: a segment becomes ACTIVE that looks since `seen` had this value have passed over. True where there was
 * one; the next look is then at everything. */
bool tms_peers_note_passed_over(tms_saver_t *saver, tms_device_mask_t seen);
/* Under the lock: takes a segment that its owner has given up out of the registry and the counters. It must not be in
 * transition. */
void tms_saver_unpublish(tms_saver_t *saver, tms_segment_t *segment);
bool tms_saver_has_segments(tms_saver_t *saver);
bool tms_saver_has_reclaimable(tms_saver_t *saver);
/* What is known about a segment when something fails. */
tms_error_context_t tms_saver_context(const char *operation, const tms_segment_t *segment);
/* Logs why other devices could not be given access, which the call does not depend on; silent at process exit, when the
 * driver has gone. */
void tms_saver_note(tms_saver_t *saver, tms_status_t status, const tms_error_t *reason);
/* Tries again what waits: the quarantine, references to contexts, deferred frees once no capture is visible, and damaged
 * segments, which become PAUSED when the driver takes back what it refused; meanwhile they are PAUSING, and belong to the
 * thread that does this. Host memory is tried on a thread of its own, which nobody waits for. Called by pause, resume, the
 * end of a capture, and allocations that ran out of memory. Cheap when nothing waits. */
void tms_saver_reclaim(tms_saver_t *saver);
/* The same in a call that can be told to stop, also while it waits for devices here: the caller has to look afterwards. */
void tms_saver_reclaim_within(tms_saver_t *saver, tms_wait_t *wait);

/* inspect.c: tms_api_t.host_backup, .segments, .find and .counters. Each takes the lock and calls no driver. */
tms_status_t tms_saver_host_backup(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer,
                                   void **host, tms_error_t *error);
size_t tms_saver_segments(tms_saver_t *saver, tms_segment_info_t *rows, size_t capacity);
tms_status_t tms_saver_find(tms_saver_t *saver, uint64_t address, tms_segment_info_t *row);
void tms_saver_counters(tms_saver_t *saver, tms_counters_t *counters);
/* Where `status` is TMS_DEVICE_LOST: adds to the message how many bytes of which tags are not ACTIVE, because touching those
 * is what loses most devices. Hands the status on. For calls at their end, with no lock held; walks the registry. */
tms_status_t tms_saver_explain_loss(tms_saver_t *saver, tms_status_t status, tms_error_t *error);

#endif
