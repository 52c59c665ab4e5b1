/* The list of stores, and the functions by which the core uses a segment's backup in the store of its kind. The saver owns
 * the list. Threads and locks are those of the operations (backup/backup.h).
 *
 * To add a store: write a .c and a .h with its operations (backup/backup.h), name its folder in PARTS of
 * tools/check_layers.py, and add its row below, its kind to TMS_BACKUP_KINDS (include/tms.h), from which Python gets the
 * name and number, its constant in _core.pyi, and its public name: BACKUPS in options.py, and the Literals of `backup` in
 * saver.py and ranks/__init__.py. The account (core/model/account.c) decides which column of the shared page shows its
 * bytes, if any. */
#ifndef TMS_BACKUP_STORES_H
#define TMS_BACKUP_STORES_H

#include "backup/backup.h"
#include "backup/disk/operations.h"
#include "backup/host/operations.h"
#include "backup/shared/operations.h"
#include "device/fingerprinter.h"

#define TMS_BACKUP_BIT(kind) (1u << TMS_BACKUP_##kind)

/* One row for each store: its member of tms_backup_stores_t, the member's type, its operations, and the kinds that it keeps.
 * The host store comes first, because others may hold its memory. */
#define TMS_BACKUP_STORE_ROWS(X)                                                                                            \
    X(host, tms_host_store_t, tms_host_operations, TMS_BACKUP_BIT(PINNED) | TMS_BACKUP_BIT(MMAP))                           \
    X(disk, tms_disk_directory_t, tms_disk_operations, TMS_BACKUP_BIT(DISK))                                                \
    X(shared, tms_shared_store_t, tms_shared_operations, TMS_BACKUP_BIT(SHARED))

typedef struct tms_backup_store {
    const tms_backup_operations_t *operations;
    void *store;
    unsigned kinds; /* TMS_BACKUP_BIT */
} tms_backup_store_t;

/* Part of the saver. Each store has its own locks. */
typedef struct tms_backup_stores {
    tms_copying_t copying;
#define TMS_BACKUP_MEMBER(member, type, operations, kinds) type member;
    TMS_BACKUP_STORE_ROWS(TMS_BACKUP_MEMBER)
#undef TMS_BACKUP_MEMBER
    tms_backup_store_t list[TMS_MAX_BACKUP_STORES]; /* the stores of the rows, then added stores */
    int count;
    tms_fingerprinter_t fingerprinter; /* used by the call that has the turn; a store sets its key */
} tms_backup_stores_t;

/* The batches of one pause: the result of each store's `begin`. Zeros: none. */
typedef struct tms_backup_batch {
    void *by_store[TMS_MAX_BACKUP_STORES];
} tms_backup_batch_t;

/* ---- the process ---- */

tms_status_t tms_backup_stores_init(tms_backup_stores_t *stores, const tms_config_t *config, const tms_copying_t *copying,
                                    tms_error_t *error);
/* For tests: adds an initialised store, before the first backup of one of its kinds. */
void tms_backup_stores_add(tms_backup_stores_t *stores, const tms_backup_operations_t *operations, void *store,
                           unsigned kinds);
/* Returns the store of a kind, or NULL: there is no such kind, or it keeps nothing. */
const tms_backup_store_t *tms_backup_stores_find(const tms_backup_stores_t *stores, tms_backup_kind_t kind);
/* Each of these calls the operation of the same name of every store. */
void tms_backup_stores_drain(tms_backup_stores_t *stores);
void tms_backup_stores_release(tms_backup_stores_t *stores);
void tms_backup_stores_enter_call(tms_backup_stores_t *stores);
void tms_backup_stores_leave_call(tms_backup_stores_t *stores);
void tms_backup_stores_after_pause(tms_backup_stores_t *stores);
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
tms_status_t tms_backup_batch_check_room(tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                                         const tms_error_context_t *context, tms_error_t *error);
/* Whether a store of the batch has the operation `help`. */
bool tms_backup_batch_can_help(const tms_backup_stores_t *stores, const tms_backup_batch_t *batch);
bool tms_backup_batch_help(const tms_backup_stores_t *stores, const tms_backup_batch_t *batch, int device);
void tms_backup_batch_end(tms_backup_stores_t *stores, tms_backup_batch_t *batch);

/* ---- one segment ---- */

/* Whether the store of this kind can copy only what has changed since the last pause. */
bool tms_backup_can_compare(const tms_backup_stores_t *stores, tms_backup_kind_t kind);
/* Sets backup->planned, the contents that the current pause saves of the segment at `address`, in a store of this kind:
 * begins its batch. `live` NULL: everything is live. Fresh fingerprints of other contents are forgotten. */
tms_status_t tms_backup_choose(tms_backup_t *backup, tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                               tms_backup_kind_t kind, const tms_live_t *live, uint64_t address,
                               const tms_error_context_t *context, tms_error_t *error);
/* After all choices of the pause. Forgets fresh fingerprints that have another key than the one in force, and returns
 * whether the plan of this backup needs fresh ones, which a pass has to compute (backup/pass.h). */
bool tms_backup_needs_fingerprints(tms_backup_t *backup, const tms_backup_stores_t *stores);
/* These call the operations of the same names. If fresh fingerprints of the same layout are known, plan sets
 * backup->changed. */
tms_status_t tms_backup_plan(tms_backup_t *backup, tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                             const tms_backup_request_t *request, const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_backup_save(tms_backup_t *backup, tms_backup_stores_t *stores, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_backup_load(tms_backup_t *backup, tms_backup_stores_t *stores, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error);
/* Whether a resume can check the contents that it has restored from the backup. */
bool tms_backup_can_verify(const tms_backup_t *backup, const tms_backup_stores_t *stores);
/* Compares the kept fingerprints with the fresh ones, which are of the restored contents. Returns TMS_BACKUP_IO if those of
 * an object differ. The fresh ones are forgotten; without them nothing is compared. */
tms_status_t tms_backup_verify(tms_backup_t *backup, const tms_backup_stores_t *stores, const tms_error_context_t *context,
                               tms_error_t *error);
/* After plan: the current pause copies all of the planned contents, although the held ones seem to be equal in part. */
void tms_backup_copy_all(tms_backup_t *backup);
/* The current pause failed: undoes plan and save. Its batch has ended. */
void tms_backup_cancel(tms_backup_t *backup, tms_backup_stores_t *stores);
/* The current pause has succeeded: the planned contents become the held ones. */
void tms_backup_commit(tms_backup_t *backup, tms_backup_stores_t *stores);
/* After a resume: the contents are no longer needed, except with TMS_HOST_RETAIN. `policy` is not TMS_HOST_DEFAULT. */
void tms_backup_discard(tms_backup_t *backup, tms_backup_stores_t *stores, tms_host_policy_t policy);
/* Moves the contents and the space of the backup to the result, for tms_backup_destroy. The backup has neither
 * afterwards. */
tms_backup_t tms_backup_take(tms_backup_t *backup);
/* The segment is freed: releases everything. */
void tms_backup_destroy(tms_backup_t *backup, tms_backup_stores_t *stores);
/* Returns the address of the copy of `bytes` at `offset` of the segment if all of it is in host memory, else NULL. If
 * `buffer` is not NULL, *buffer becomes a reference to the memory, which the caller owns. */
void *tms_backup_find(const tms_backup_t *backup, const tms_backup_stores_t *stores, uint64_t offset, uint64_t bytes,
                      tms_host_buffer_t **buffer);
/* Reads from a backup that is not in host memory. If all of `bytes` at `offset` of the segment are held, copies them to
 * `destination` and sets *found. The caller owns the segment. */
tms_status_t tms_backup_read(const tms_backup_t *backup, const tms_backup_stores_t *stores, uint64_t offset, uint64_t bytes,
                             void *destination, bool *found, tms_wait_t *wait, const tms_error_context_t *context,
                             tms_error_t *error);
/* Compares a backup with a copy of the same contents in host memory. The planned contents of the backup are its held ones,
 * of which a part was copied again. *differs becomes whether a byte differs, and *place the first offset in the segment that
 * does. Reads a file in parts. */
tms_status_t tms_backup_compare(const tms_backup_t *backup, const tms_backup_t *copy, const tms_backup_stores_t *stores,
                                bool *differs, uint64_t *place, tms_wait_t *wait, const tms_error_context_t *context,
                                tms_error_t *error);
/* Returns the number of bytes that the backup holds, or the space that it occupies without contents. */
uint64_t tms_backup_taken_bytes(const tms_backup_t *backup, const tms_backup_stores_t *stores);
/* Writes that number for each store, in the order of their list. `bytes` has room for all of them. */
void tms_backup_taken_by_store(const tms_backup_t *backup, const tms_backup_stores_t *stores, uint64_t *bytes);

#endif
