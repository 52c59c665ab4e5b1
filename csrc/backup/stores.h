/* The stores, and the backup of a segment in whichever of them its kind belongs to: what the core calls.
 *
 * To add a store: a .c and a .h with its operations (backup/backup.h); its row below; its kind's row (TMS_BACKUP_KINDS of
 * include/tms.h), from which Python has the kind's name and number; what users call it (_saver/arguments.py). */
#ifndef TMS_BACKUP_STORES_H
#define TMS_BACKUP_STORES_H

#include "backup/backup.h"
#include "backup/disk/operations.h"
#include "backup/host/operations.h"

#define TMS_BACKUP_BIT(kind) (1u << TMS_BACKUP_##kind)

/* One row a store: its member of tms_backup_stores_t, the type of that, its operations, the kind by which one pause chooses
 * it, and all kinds of backups that it keeps. The host store is the first, since others may hold memory of it. */
#define TMS_BACKUP_STORE_ROWS(X)                                                                                            \
    X(host, tms_host_store_t, tms_host_operations, TMS_BACKUP_PINNED, TMS_BACKUP_BIT(PINNED) | TMS_BACKUP_BIT(MMAP))        \
    X(disk, tms_disk_directory_t, tms_disk_operations, TMS_BACKUP_DISK, TMS_BACKUP_BIT(DISK))

typedef struct tms_backup_store {
    const tms_backup_operations_t *operations;
    void *store;
    tms_backup_kind_t chosen_as; /* one of `kinds` */
    unsigned kinds;              /* TMS_BACKUP_BIT */
} tms_backup_store_t;

/* Lives in the saver. The stores have locks of their own. */
typedef struct tms_backup_stores {
    tms_copying_t copying;
#define TMS_BACKUP_MEMBER(member, type, operations, chosen_as, kinds) type member;
    TMS_BACKUP_STORE_ROWS(TMS_BACKUP_MEMBER)
#undef TMS_BACKUP_MEMBER
    tms_backup_store_t list[TMS_BACKUP_STORES_MOST]; /* those of the rows, and what was added */
    int count;
} tms_backup_stores_t;

/* What one pause has under way: of each store what its `begin` has made. Zeros: nothing. */
typedef struct tms_backup_batch {
    void *of[TMS_BACKUP_STORES_MOST];
} tms_backup_batch_t;

/* ---- the process ---- */

tms_status_t tms_backup_stores_init(tms_backup_stores_t *stores, const tms_config_t *config, const tms_copying_t *copying,
                                    tms_error_t *error);
/* One more store, which has been initialised; before the first backup of one of its kinds. For tests. */
void tms_backup_stores_add(tms_backup_stores_t *stores, const tms_backup_operations_t *operations, void *store,
                           tms_backup_kind_t chosen_as, unsigned kinds);
/* The store of a kind; NULL: there is none. */
const tms_backup_store_t *tms_backup_stores_find(const tms_backup_stores_t *stores, tms_backup_kind_t kind);
/* Whether one pause can choose this: TMS_BACKUP_NONE, or the kind by which a store is chosen. */
bool tms_backup_stores_is_choice(const tms_backup_stores_t *stores, int32_t kind);
/* The kind of backup that a pause makes for which `choice` was chosen: that one, but `own`, the region's, where the same
 * store keeps both. */
tms_backup_kind_t tms_backup_stores_choose(const tms_backup_stores_t *stores, tms_backup_kind_t choice,
                                           tms_backup_kind_t own);
/* Each of these does for every store what its operation of that name says. */
void tms_backup_stores_drain(tms_backup_stores_t *stores);
void tms_backup_stores_release(tms_backup_stores_t *stores);
void tms_backup_stores_after_resume(tms_backup_stores_t *stores);
void tms_backup_stores_retry(tms_backup_stores_t *stores);
void tms_backup_stores_count(const tms_backup_stores_t *stores, tms_counters_t *counters);
void tms_backup_stores_close(tms_backup_stores_t *stores, double deadline);
void tms_backup_stores_at_exit(tms_backup_stores_t *stores);
void tms_backup_stores_lock(tms_backup_stores_t *stores);
void tms_backup_stores_unlock(tms_backup_stores_t *stores);
void tms_backup_stores_after_fork_in_child(tms_backup_stores_t *stores);

/* ---- one pause ---- */

tms_status_t tms_backup_batch_start(tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                                    const tms_error_context_t *context, tms_error_t *error);
/* Whether there may be something to help with. */
bool tms_backup_batch_can_help(const tms_backup_stores_t *stores, const tms_backup_batch_t *batch);
bool tms_backup_batch_help(const tms_backup_stores_t *stores, const tms_backup_batch_t *batch, int device);
void tms_backup_batch_end(tms_backup_stores_t *stores, tms_backup_batch_t *batch);

/* ---- one segment ---- */

/* A backup that still has memory or a file that will do is used again. What is planned is backup->planned. */
tms_status_t tms_backup_plan(tms_backup_t *backup, tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                             const tms_backup_request_t *request, const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_backup_save(tms_backup_t *backup, tms_backup_stores_t *stores, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_backup_load(tms_backup_t *backup, tms_backup_stores_t *stores, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error);
/* The pause under way failed: takes away what plan made, and the contents of what save has written to. Its batch has ended.
 */
void tms_backup_cancel(tms_backup_t *backup, tms_backup_stores_t *stores);
/* The pause under way has succeeded: the planned contents count from now on. */
void tms_backup_commit(tms_backup_t *backup, tms_backup_stores_t *stores);
/* After a resume: contents are no longer needed, but for TMS_HOST_RETAIN. `policy` is not TMS_HOST_DEFAULT. */
void tms_backup_discard(tms_backup_t *backup, tms_backup_stores_t *stores, tms_host_policy_t policy);
/* The segment is freed: everything goes. */
void tms_backup_destroy(tms_backup_t *backup, tms_backup_stores_t *stores);
/* Where the copy of `bytes` at `offset` of the segment lies, if all of it is in host memory; else NULL. `buffer` may be
 * NULL; else *buffer is a reference to it, the caller's. */
void *tms_backup_find(const tms_backup_t *backup, const tms_backup_stores_t *stores, uint64_t offset, uint64_t bytes,
                      tms_host_buffer_t **buffer);
/* Bytes of what the backup holds, or of the space that it takes without contents. */
uint64_t tms_backup_taken_bytes(const tms_backup_t *backup, const tms_backup_stores_t *stores);

#endif
