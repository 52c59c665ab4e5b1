/* A backup, and the interface of the stores that keep one: what every store implements. backup/stores.h has the list of them
 * and the functions that the core calls.
 *
 * A backup belongs to its segment. The thread that owns the segment in a transition handles it, without a lock; `find` and
 * `reserved_bytes` are called under the saver's lock, for segments that are in no transition.
 *
 * Life: plan (what this pause keeps, and where) -> save (contents are in it once the copier has waited) -> commit -> load
 * (contents are on the device again once the copier has waited) -> discard. cancel undoes plan and save. `saved` says
 * whether it holds contents, and `held` what they are.
 *
 * Each store has a slot in every backup: one pause may keep a segment's contents in another store than the last. A retained
 * backup holds the contents of an earlier pause. A pause writes over it, so that its memory keeps its address from pause to
 * pause. One that fails before the commit leaves it as it was where nothing has been copied into it yet; else it has no
 * contents until the next pause, since they are in part those of either pause, but its memory stays where it is. */
#ifndef TMS_BACKUP_H
#define TMS_BACKUP_H

#include <stdbool.h>

#include "backup/content.h"
#include "base/config.h"
#include "device/copier.h"
#include "device/wait.h"

/* There is room for so many stores. */
enum { TMS_BACKUP_STORES_MOST = 4 };

/* What a store has for a segment: the store's own, which alone looks at it. NULL: nothing. */
typedef struct tms_backup_slot {
    void *kept;  /* from the pauses before */
    void *fresh; /* made by the pause under way, where `kept` will not do */
} tms_backup_slot_t;

typedef struct tms_backup {
    tms_backup_kind_t kind;                          /* as the region said */
    tms_host_policy_t policy;                        /* as the region said; TMS_HOST_DEFAULT */
    uint64_t bytes;                                  /* of the segment's contents: the size that was asked for */
    bool saved;                                      /* holds the contents of a pause */
    tms_backup_content_t held;                       /* if saved */
    tms_backup_content_t planned;                    /* by the pause under way */
    tms_backup_slot_t slots[TMS_BACKUP_STORES_MOST]; /* in the order of the stores */
} tms_backup_t;

/* What one pause wants of the backup of one segment. */
typedef struct tms_backup_request {
    tms_backup_kind_t kind;   /* this time */
    tms_host_policy_t policy; /* for host memory that is made; not TMS_HOST_DEFAULT */
    int device;               /* of the segment */
    const void *group;        /* what is discarded together: segments with the same; compared only */
    uint64_t address;         /* of the segment */
    const tms_live_t *live;   /* NULL: everything is */
    tms_wait_t *wait;         /* of the call, or NULL */
} tms_backup_request_t;

/* What a store is made with. */
typedef struct tms_backup_setup {
    const tms_config_t *config;
    const tms_copying_t *copying;
    struct tms_host_store *host; /* whose limits all host memory counts against */
} tms_backup_setup_t;

/* The operations of a store; `store` is its instance. Those that may be NULL do nothing then.
 *
 * Unless it says otherwise an operation is called without any lock, and on any thread; those of one segment never on two
 * threads at once. A failure fills *error, and leaves the slot such that cancel, discard and destroy can follow. */
typedef struct tms_backup_operations {
    const char *place; /* where contents go, for the log: "host memory" */

    /* ---- one segment ---- */

    /* Makes in `slot->fresh` what the kept memory, file or the like lacks for content->bytes, which may be 0. What is kept
     * already and will do is used again. `batch`: what `begin` has made, or NULL. After a failure cancel follows.
     * TMS_OUT_OF_HOST_MEMORY, TMS_BACKUP_IO; what request->wait says. */
    tms_status_t (*plan)(void *store, void *batch, tms_backup_t *backup, tms_backup_slot_t *slot,
                         const tms_backup_request_t *request, const tms_backup_content_t *content,
                         const tms_error_context_t *context, tms_error_t *error);
    /* Begins to copy backup->planned, which is not nothing, from the segment at `address`; all of it is there once the
     * copier has waited. A store whose copies do not end in the copier's stream adds a relay to it, whose `wait` then is a
     * part of that (device/copier.h). Memory that the device writes to is held by the copier. Sets `saved` to false before
     * what is held is written over. On the thread of the copier's device, beside those of other devices. */
    tms_status_t (*save)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);
    /* The same of backup->held, to the device. What is held stays as it is, whatever comes of it: the call can be made
     * again. */
    tms_status_t (*load)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);
    /* The pause has succeeded: `fresh`, if there is one, becomes `kept`; what backup->planned does not need goes. Called for
     * every store with something in its slot, whichever was planned. Cannot fail. */
    void (*commit)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot);
    /* The pause has failed: `fresh` goes. Also where it was not planned, or plan has failed. */
    void (*cancel)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot);
    /* After a resume: contents are no longer needed. True: what backup->held says stays all the same (TMS_HOST_RETAIN). A
     * store may keep the space. `policy` is not TMS_HOST_DEFAULT. */
    bool (*discard)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_host_policy_t policy);
    /* NULL, or where the copy of `bytes` at `offset` of the segment lies, if all of it is in host memory; else NULL.
     * `buffer` may be NULL; else *buffer is a reference of the caller's to the memory. Calls no driver. */
    void *(*find)(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset, uint64_t bytes,
                  tms_host_buffer_t **buffer);
    /* NULL, or the space that the slot takes although no contents are held. */
    uint64_t (*reserved_bytes)(const tms_backup_t *backup, const tms_backup_slot_t *slot);
    /* The segment is freed: everything goes. Cannot fail: what cannot be given back goes to the quarantine. */
    void (*destroy)(void *store, tms_backup_t *backup, tms_backup_slot_t *slot);

    /* ---- one pause; all of these may be NULL ---- */

    /* Before the first plan of a pause in this store. */
    tms_status_t (*begin)(void *store, void **batch, const tms_error_context_t *context, tms_error_t *error);
    /* After the last plan. What was planned need not be ready before `save` gets to it. */
    tms_status_t (*start)(void *batch, const tms_error_context_t *context, tms_error_t *error);
    /* On a thread that waits for its device: a step of what makes the planned memory ready. False: there is none. */
    bool (*help)(void *batch, int device);
    /* After the last save, or a failure before: waits for what is under way. Before commit and cancel. */
    void (*end)(void *batch);

    /* ---- the process; all but `init` may be NULL ---- */

    /* The instance, which is zeros. Makes no driver call and no file. */
    tms_status_t (*init)(void *store, const tms_backup_setup_t *setup, tms_error_t *error);
    /* For tests: gives back all that it holds; no backup is left. The quarantine is still there. */
    void (*drain)(void *store);
    /* For tests, after drain; the quarantine has been released. */
    void (*release)(void *store);
    /* A resume has ended: gives back at once what need not wait for a device. */
    void (*after_resume)(void *store);
    /* Tries to give back again what the driver or the system has refused; waits for no device. */
    void (*retry)(void *store);
    /* Adds to `counters` what it holds. */
    void (*count)(void *store, tms_counters_t *counters);
    /* At exit: no thread of it begins another driver call. Waits for calls under way until `deadline` (tms_wait_now). */
    void (*close)(void *store, double deadline);
    /* At exit, after close of all stores: nothing of it outlives the process. */
    void (*at_exit)(void *store);
    /* Before a fork, and after it in the parent: takes and releases its locks. */
    void (*lock)(void *store);
    void (*unlock)(void *store);
    /* After a fork in the child, with the locks held: forgets what is the parent's, and makes them anew. */
    void (*after_fork_in_child)(void *store);
} tms_backup_operations_t;

/* Whether a resume with `zero` has something to zero. */
static inline bool tms_backup_lacks_contents(const tms_backup_t *backup) {
    return !backup->saved || backup->held.bytes < backup->bytes;
}
/* What a resume copies. */
static inline uint64_t tms_backup_held_bytes(const tms_backup_t *backup) { return backup->saved ? backup->held.bytes : 0; }

#endif
