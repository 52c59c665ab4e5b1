/* The saver: every managed allocation of the process, their states, and what all modules of core/ share.
 *
 * The saver owns the registry, the segments and their states, and the deferred frees; `lock` guards all of that. It also
 * owns the quarantine and the devices' locks, which have locks of their own, leaves below this one. It is held for look-ups
 * and state changes, and while access for peers is granted or streams are asked whether they capture (both rare and
 * short); never across dlopen, a wait for the device, a copy, or the creation or release of physical memory. Callers may
 * hold torch's allocator mutex and the GIL; no thread may call either with `lock` held.
 *
 * A segment in PAUSING, RESUMING (transition.h) or REPAIRING (reclaim.h) belongs to the call that put it there, which
 * uses it without the lock. Frees of such a segment only set `free_requested`.
 *
 * What is done with it is in modules above this one: allocation, peers, captures, turn, retire, reclaim, inspect, and
 * pause and resume. */
#ifndef TMS_SAVER_H
#define TMS_SAVER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "backup/stores.h"
#include "base/stats.h"
#include "core/segment.h"
#include "core/transition/pendings.h"
#include "device/capture.h"
#include "device/device_lock.h"

/* Looks for devices that have come into use and have no access to what was allocated before (peers.h). */
typedef struct tms_peer_looks {
    tms_device_mask_t complete; /* all ACTIVE segments are accessible to these, as far as they can be */
    tms_device_mask_t seen;     /* in use at the last look, which may have failed for some segment */
    uint32_t left_out, pause;   /* allocations since a look that failed, and how many of them do not look again */
} tms_peer_looks_t;

/* How long the begin of a capture waits for a callback of a pause or resume: far longer than one that can run takes. */
#define TMS_CALLBACK_PATIENCE_SECONDS 5.0

typedef struct tms_saver {
    const tms_config_t *config;
    tms_log_t *log;
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
    tms_segment_t *deferred; /* frees that had to wait: mapped, out of the registry */
    tms_registry_t
        quarantined_ranges; /* freed segments in the quarantine whose address range the driver did not take back */
    tms_quarantine_t quarantine;
    tms_device_locks_t device_locks;
    uint64_t damaged; /* segments in the registry that are DAMAGED */
    tms_peer_looks_t peers;

    tms_pendings_t pendings; /* has its own lock */
    _Atomic uint64_t memory_margin_bytes;
    _Atomic int host_policy; /* tms_host_policy_t, not TMS_HOST_DEFAULT: where neither call nor region says */
    _Atomic bool forked;     /* this process is a forked child: nothing may use the GPU */
    tms_stats_t stats;
} tms_saver_t;

tms_status_t tms_saver_init(tms_saver_t *saver, const tms_config_t *config, tms_log_t *log, tms_devices_t *devices,
                            tms_region_defaults_t *regions, tms_error_t *error);
/* For one that has no segments (any more): the process's own is never released. No other thread may be in the saver. */
void tms_saver_release(tms_saver_t *saver);

/* TMS_FORKED where this process is a forked child. The first thing that every call into the saver does. */
tms_status_t tms_saver_check_process(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error);
/* TMS_INVALID_ARGUMENT where a limit in the environment is malformed. For the calls with which a program begins to use this
 * library: regions, allocations, pauses and resumes. */
tms_status_t tms_saver_check_settings(const tms_saver_t *saver, tms_error_t *error);
/* The settings for an allocation of this thread: its region, else a visible capture's, else the initial ones. */
tms_region_t tms_saver_settings(tms_saver_t *saver);
/* `policy`, or the process's where that is TMS_HOST_DEFAULT. */
tms_host_policy_t tms_saver_host_policy(tms_saver_t *saver, tms_host_policy_t policy);

/* Whether an address is the start of a managed allocation, or lies in one. Takes the lock, calls no driver. */
bool tms_saver_owns(tms_saver_t *saver, uint64_t address);
bool tms_saver_has_segments(tms_saver_t *saver);
/* Under the lock: takes a segment that its owner has given up out of the registry and the counters. It must not be in
 * transition. */
void tms_saver_unpublish(tms_saver_t *saver, tms_segment_t *segment);

/* What is known about a segment when something fails. */
tms_error_context_t tms_saver_context(const char *operation, const tms_segment_t *segment);
/* Logs why other devices could not be given access, which the call does not depend on; silent at process exit, when the
 * driver has gone. */
void tms_saver_note(tms_saver_t *saver, tms_status_t status, const tms_error_t *reason);

#endif
