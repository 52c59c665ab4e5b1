/* A backup, and the interface that every store implements. backup/stores.h has the list of stores and the functions that the
 * core calls.
 *
 * A backup belongs to its segment. The thread that owns the segment during a transition uses it without a lock. `find` and
 * `reserved_bytes` are called under the saver's lock, for segments outside a transition.
 *
 * Life: choose (what this pause keeps) -> plan (where) -> save (complete once the copier has waited) -> commit -> load
 * (complete once the copier has waited) -> discard. cancel undoes choose, plan and save. `saved`: it holds contents, which
 * `held` describes.
 *
 * Each store has a slot in every backup, because successive pauses may use different stores. A retained backup holds the
 * contents of an earlier pause. A pause overwrites what has changed in it (fingerprints.h), so that its memory keeps its
 * address from pause to pause. A pause that fails before anything was copied into it leaves it unchanged. A pause that fails
 * later leaves it without contents until the next pause, because they would be a mixture; its memory stays. */
#ifndef TMS_BACKUP_H
#define TMS_BACKUP_H

#include <stdbool.h>

#include "backup/content.h"
#include "backup/fingerprints.h"
#include "base/config.h"
#include "device/copier.h"
#include "device/wait.h"

/* The maximum number of stores. */
enum { TMS_MAX_BACKUP_STORES = 4 };

/* A store's data for a segment, opaque to everything else. NULL: nothing. */
typedef struct tms_backup_slot {
    void *kept;  /* from earlier pauses */
    void *fresh; /* made by the current pause if `kept` does not suffice */
} tms_backup_slot_t;

typedef struct tms_backup {
    tms_backup_kind_t kind;                         /* the region's choice */
    tms_host_policy_t policy;                       /* the region's choice; TMS_HOST_DEFAULT: none */
    uint64_t bytes;                                 /* size of the segment's contents: the requested size */
    bool saved;                                     /* holds the contents of a pause */
    tms_backup_content_t held;                      /* the saved contents, if `saved` */
    tms_backup_content_t planned;                   /* the contents that the current pause has chosen to save */
    bool partial;                                   /* the current pause copies `changed` only */
    tms_backup_content_t changed;                   /* the part of `planned` that the store does not have */
    tms_fingerprints_t fingerprints;                /* of `held`, and of `planned` */
    tms_backup_slot_t slots[TMS_MAX_BACKUP_STORES]; /* in the order of the stores */
} tms_backup_t;

/* The request that one pause makes for one segment. */
typedef struct tms_backup_request {
    tms_host_policy_t policy; /* for new host memory; not TMS_HOST_DEFAULT */
    int device;               /* of the segment */
    const void *group;        /* segments with equal groups are discarded together; only compared */
    tms_wait_t *wait;         /* of the call, or NULL */
} tms_backup_request_t;

/* The arguments of `init`. */
typedef struct tms_backup_setup {
    const tms_config_t *config;
    const tms_copying_t *copying;
    struct tms_host_store *host; /* all host memory counts against its limits */
    struct tms_fingerprinter *fingerprinter;
} tms_backup_setup_t;

/* The operations of a store; `store` is its instance. An optional operation may be NULL and then does nothing.
 *
 * Unless stated otherwise, an operation is called with no lock held, on any thread. Operations on one segment are never
 * called on two threads at once. A failure fills *error and leaves the slot valid for cancel, discard and destroy. */
typedef struct tms_backup_operations {
    const char *place; /* the store's name in log lines, such as "host memory" */
    /* The store plans by fingerprint: before `plan` the fresh fingerprints of all contents that are planned in it are
     * computed, with the key that is in force after `begin`, which has set one. backup->fingerprints.fresh is NULL if the
     * kernel could not run. `plan` itself sets backup->partial and backup->changed. A resume computes the fingerprints of
     * what it has restored, and fails if those of an object differ. */
    bool by_fingerprint;

    /* ---- one segment ---- */

    /* Prepares space for content->bytes bytes, which is backup->planned; 0 is allowed. Reuses `slot->kept` if it suffices,
     * otherwise creates `slot->fresh`. `batch` is the result of `begin`, or NULL. After a failure `cancel` is called.
     * TMS_OUT_OF_HOST_MEMORY, TMS_BACKUP_IO; TMS_INTERRUPTED if request->wait was cancelled. */
    tms_status_t (*plan)(void *store, void *batch, tms_backup_t *backup, tms_backup_slot_t *slot,
                         const tms_backup_request_t *request, const tms_backup_content_t *content,
                         const tms_error_context_t *context, tms_error_t *error);
    /* Begins to copy tms_backup_copied(backup), which is not empty, from the segment at `address`. The copy is complete once
     * the copier has waited. A store whose copies do not end in the copier's stream adds a relay to the copier
     * (device/copier.h). Host memory that the device writes to is registered with the copier (tms_copier_hold). Sets `saved`
     * to false before the held contents are overwritten. Called on the thread of the copier's device, concurrently with the
     * calls for other devices. */
    tms_status_t (*save)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);
    /* Optional, after plan; not of a store that plans by fingerprint. Returns the size of the blocks of the backup in which
     * the held contents can be overwritten in place, because the planned contents have the same layout. 0: everything must
     * be copied, because the space is new or a program may have written to it. */
    uint64_t (*block_bytes)(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot);
    /* Begins to copy backup->held to the device. The held contents stay unchanged even after a failure, so that the call can
     * be repeated. */
    tms_status_t (*load)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);
    /* The pause has succeeded: `fresh`, if any, becomes `kept`; space that backup->planned does not need is released. Called
     * for every store with a non-empty slot. Cannot fail. */
    void (*commit)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot);
    /* The pause has failed: releases `fresh`. It is called even if nothing was planned or plan failed. */
    void (*cancel)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot);
    /* Called after a resume, when the contents are no longer needed. A store may keep the space. Returns true if it keeps
     * the contents as well (TMS_HOST_RETAIN). `policy` is not TMS_HOST_DEFAULT. */
    bool (*discard)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_host_policy_t policy);
    /* Optional. Returns the address of the copy of `bytes` at `offset` of the segment if all of it is in host memory, else
     * NULL. If `buffer` is not NULL, *buffer becomes a reference to the memory, which the caller owns. Makes no driver
     * call. */
    void *(*find)(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset, uint64_t bytes,
                  tms_host_buffer_t **buffer);
    /* Optional, for a store whose copies are not in host memory. If all of `bytes` at `offset` of the segment are held,
     * copies them to `destination` and sets *found. Called on the thread of the call that owns the segment. TMS_BACKUP_IO,
     * TMS_OUT_OF_HOST_MEMORY, TMS_INTERRUPTED. */
    tms_status_t (*read)(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset,
                         uint64_t bytes, void *destination, bool *found, tms_wait_t *wait,
                         const tms_error_context_t *context, tms_error_t *error);
    /* Optional. The contents that were restored at `offset` of the segment are not those of the pause: the slot keeps them,
     * and no later pause finds them. Appends a sentence to the error that says where they are. `error` may be NULL. */
    void (*reject)(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset,
                   tms_error_t *error);
    /* Optional. Returns the space that the slot occupies while no contents are held. */
    uint64_t (*reserved_bytes)(const tms_backup_t *backup, const tms_backup_slot_t *slot);
    /* The segment is freed: releases everything. Cannot fail: resources that cannot be released are quarantined. */
    void (*destroy)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot);

    /* ---- one pause; all optional ---- */

    /* Called when a pause chooses this store for the first time, before all plans. */
    tms_status_t (*begin)(void *store, void **batch, const tms_error_context_t *context, tms_error_t *error);
    /* Called after the last plan. The planned space need not be ready before `save` uses it. */
    tms_status_t (*start)(void *batch, const tms_error_context_t *context, tms_error_t *error);
    /* Called in place of `start` if the pause is only checked: fails if there is no room for what is planned. */
    tms_status_t (*check_room)(void *batch, const tms_error_context_t *context, tms_error_t *error);
    /* Called on a thread that waits for its device: does one step of preparing the planned memory. Returns false if there is
     * nothing to do. */
    bool (*help)(void *batch, int device);
    /* Called after the last save or a failure, before commit and cancel: ends the batch and waits for its threads. */
    void (*end)(void *batch);

    /* ---- the process; all but `init` optional ---- */

    /* Initialises the zeroed instance. Makes no driver call and creates no file. */
    tms_status_t (*init)(void *store, const tms_backup_setup_t *setup, tms_error_t *error);
    /* For tests: releases everything. No backup is left; the quarantine still exists. */
    void (*drain)(void *store);
    /* For tests, after drain; the quarantine has been released. */
    void (*release)(void *store);
    /* A call that has the turn, such as a pause or a resume, begins: from here on the threads of the store begin no driver
     * call, because the call would wait for the driver's locks. Retries failed removals of files. */
    void (*enter_call)(void *store);
    /* The call ends, and has the turn until this returns. */
    void (*leave_call)(void *store);
    /* A pause, or the check of one, has ended: begins what can be done while the memory is paused. */
    void (*after_pause)(void *store);
    /* A resume has ended: releases at once what can be released without waiting for a device. */
    void (*after_resume)(void *store);
    /* Retries failed releases. Does not wait for a device. */
    void (*retry)(void *store);
    /* Adds the store's memory and files to `counters`. */
    void (*count)(void *store, tms_counters_t *counters);
    /* At exit: the threads of the store begin no further driver call. Waits for calls in flight until `deadline`
     * (tms_wait_now). */
    void (*close)(void *store, double deadline);
    /* At exit, after close of all stores: removes everything that would outlive the process. */
    void (*at_exit)(void *store);
    /* Before a fork, and after it in the parent: acquire and release its locks. */
    void (*lock)(void *store);
    void (*unlock)(void *store);
    /* After a fork in the child, with the locks held: forgets everything, which belongs to the parent, and reinitialises the
     * locks. */
    void (*after_fork_in_child)(void *store);
} tms_backup_operations_t;

/* Returns the contents that the current pause copies. */
static inline const tms_backup_content_t *tms_backup_copied(const tms_backup_t *backup) {
    return backup->partial ? &backup->changed : &backup->planned;
}
/* Whether a resume brings part of the segment back without contents. */
static inline bool tms_backup_lacks_contents(const tms_backup_t *backup) {
    return !backup->saved || backup->held.bytes < backup->bytes;
}
/* Returns the number of bytes that a resume copies. */
static inline uint64_t tms_backup_held_bytes(const tms_backup_t *backup) { return backup->saved ? backup->held.bytes : 0; }

#endif
