/* The saver: every managed allocation of the process, their states, and the shared state of core/.
 *
 * The saver owns the registry, the segments and their states, and the deferred frees; `lock` guards all of these. It also
 * owns the quarantine, the devices' locks and the descriptors, which have their own locks, leaves below this one. `lock` is
 * held for look-ups and state changes, and while peer access is granted, memory is exported or streams are queried for
 * captures (all rare and short). It is never held across dlopen, a wait for the device, a copy, or the creation or release
 * of physical memory. Any thread. Callers may hold torch's allocator mutex and the GIL; no thread may acquire either while
 * it holds `lock`.
 *
 * A segment in PAUSING, RESUMING (steps.h) or REPAIRING (reclaim.h) belongs to the call that put it there, which uses
 * it without the lock. A free of such a segment only sets `free_requested`.
 *
 * The modules above this one operate on it: the rest of model/, allocation/ and transition/. */
#ifndef TMS_SAVER_H
#define TMS_SAVER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "backup/stores.h"
#include "base/descriptors.h"
#include "base/events.h"
#include "base/nvtx.h"
#include "base/stats.h"
#include "core/model/account.h"
#include "core/model/guard.h"
#include "core/model/pending_resumes.h"
#include "core/model/run.h"
#include "device/capture.h"
#include "device/device_lock.h"

/* The scans that grant access to devices that have come into use (peers.h). */
typedef struct tms_peer_scans {
    tms_device_mask_t complete; /* devices that have access to every ACTIVE segment that they can reach */
    tms_device_mask_t seen;     /* devices in use at the last scan, which may have failed for a segment */
    uint32_t skipped;           /* allocations that have skipped the scan since one failed */
    uint32_t skip_limit;        /* number of allocations that skip it */
} tms_peer_scans_t;

/* How long the begin of a capture waits for a callback of a pause or resume: far longer than a callback that is not blocked
 * takes. */
#define TMS_CALLBACK_PATIENCE_SECONDS 5.0

typedef struct tms_saver {
    const tms_config_t *config;
    tms_log_t *log;
    tms_devices_t *devices;
    tms_region_defaults_t *regions;
    tms_backup_stores_t stores;

    /* The lock, and whose turn it is (model/turn.h). */
    pthread_mutex_t lock;
    pthread_cond_t turn; /* broadcast when a transition ends */
    bool transition_running;
    double callback_began; /* start of the running transition's callback, on tms_wait_now's clock; 0: it is in none */
    double callback_patience_seconds; /* TMS_CALLBACK_PATIENCE_SECONDS; tests use less */

    /* Registries, guarded by `lock`. */
    tms_registry_t registry;            /* segments */
    tms_segment_t *deferred;            /* deferred frees: mapped, not in the registry */
    struct tms_kind *kinds;             /* the kinds of allocations (model/kinds.h) */
    struct tms_kind *guard_page_kinds;  /* the kinds of guard pages */
    tms_registry_t ranges;              /* reserved address ranges */
    tms_registry_t quarantined_ranges;  /* address ranges that the driver failed to free */
    tms_registry_t handles;             /* the program's handles (allocation/handles.h), by number */
    uint64_t handles_made;              /* handles made so far */
    uint64_t orphans;                   /* segments that the program has unmapped while a call owns them (orphans.h) */
    struct tms_late_range *late_ranges; /* addresses that the program has freed while an orphan was mapped there */
    uint64_t marks;                     /* the last mark of a walk over tags or runs */
    uint64_t steps;                     /* segments and tags that transitions have visited; for complexity tests */

    /* Captures, and access of other devices and processes. Guarded by `lock`, except where a comment says otherwise. */
    tms_capture_t capture;
    tms_peer_scans_t peers;
    tms_guard_t guard;
    uint64_t exports;              /* exports made so far */
    tms_descriptors_t descriptors; /* the descriptors of exported memory; has its own lock */

    /* Resources besides the segments. Each member has its own lock. */
    tms_quarantine_t quarantine;
    tms_device_locks_t device_locks;
    tms_pending_resumes_t pending_resumes;

    /* Settings of the process. */
    _Atomic uint64_t memory_margin_bytes;
    _Atomic int host_policy; /* tms_host_policy_t, not TMS_HOST_DEFAULT: the process's policy */
    _Atomic bool forked;     /* this process is a forked child and must not use the GPU */

    /* The account, and where its changes are published. */
    tms_stats_t stats;
    tms_account_t account;
    tms_events_t events; /* has its own lock */
    tms_nvtx_t nvtx;
    tms_shared_page_t shared_page;
} tms_saver_t;

tms_status_t tms_saver_init(tms_saver_t *saver, const tms_config_t *config, tms_log_t *log, tms_devices_t *devices,
                            tms_region_defaults_t *regions, tms_error_t *error);
/* For tests: the process's own saver is never released. It must have no segments, and no other thread may use it. */
void tms_saver_release(tms_saver_t *saver);

/* TMS_FORKED if this process is a forked child. Calls that can fail with it check this first. */
tms_status_t tms_saver_check_process(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error);
/* TMS_INVALID_ARGUMENT if a limit in the environment is malformed. Checked by regions, allocations, pauses and resumes. */
tms_status_t tms_saver_check_settings(const tms_saver_t *saver, tms_error_t *error);
/* Returns the settings for an allocation of this thread: the settings of its region, else of a visible capture, else the
 * initial settings. */
tms_region_t tms_saver_settings(tms_saver_t *saver);
/* Returns `policy`, or the process's policy if `policy` is TMS_HOST_DEFAULT. */
tms_host_policy_t tms_saver_host_policy(tms_saver_t *saver, tms_host_policy_t policy);

/* Whether anything is managed. Takes the lock; makes no driver call. */
bool tms_saver_has_segments(tms_saver_t *saver);
/* Under the lock: removes a freed segment from the registry and the counters. It must not be in transition. */
void tms_saver_unpublish(tms_saver_t *saver, tms_segment_t *segment);

/* Returns the error context of a segment. */
tms_error_context_t tms_saver_context(const char *operation, const tms_segment_t *segment);
/* Logs a failure to grant peer access, which does not fail the call. Silent at process exit, when the driver has shut
 * down. */
void tms_saver_log_peer_failure(tms_saver_t *saver, tms_status_t status, const tms_error_t *reason);

#endif
