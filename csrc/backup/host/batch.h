/* Batches, which make the host memory of one pause ready while it copies, and the buffers that they hand out.
 *
 * A batch is used by the thread that made it, but for tms_host_batch_help; buffers by any thread that has a reference.
 * Without the store's lock. */
#ifndef TMS_HOST_BATCH_H
#define TMS_HOST_BATCH_H

#include "backup/host/state.h"
#include "device/wait.h"

/* ---- batches ---- */

/* What a buffer is for. Buffers of one batch with equal device, kind and group share blocks, so that they are given back
 * together; `group` is compared only. */
typedef struct tms_host_request {
    uint64_t bytes; /* not 0 */
    int device;
    tms_backup_kind_t kind; /* PINNED or MMAP */
    const void *group;
} tms_host_request_t;

/* Empty. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_batch_create(struct tms_host_batch **batch, tms_host_store_t *store,
                                   const tms_error_context_t *context, tms_error_t *error);
/* One reference to a new buffer, the caller's; from the pool if that has room in one piece, else planned. Its `memory` is
 * known once the batch has been started. */
tms_status_t tms_host_batch_add(struct tms_host_batch *batch, const tms_host_request_t *request, tms_host_buffer_t **buffer,
                                const tms_error_context_t *context, tms_error_t *error);
/* Maps what was planned and begins to make it usable. TMS_OUT_OF_HOST_MEMORY also where the headroom is too small for all of
 * it already (what waits to be released, and idle pooled memory, is given back before that is said). The caller then
 * destroys the batch and drops the buffers. Where no thread can be had, tms_host_buffer_await does its work. */
tms_status_t tms_host_batch_start(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error);
/* Cancels what is under way and joins its threads; buffers stay. NULL is fine. After a failure, before the buffers are
 * dropped. */
void tms_host_batch_destroy(struct tms_host_batch *batch);

/* For on_idle of a copier: pins the first prefaulted piece of `device`. False: there is none. */
bool tms_host_batch_help(struct tms_host_batch *batch, int device);
/* For tms_host_store_reserve: plans a block without buffers, for the pool; maps what is planned, and tells the
 * store. */
tms_status_t tms_host_batch_plan_pool(struct tms_host_batch *batch, int device, uint64_t bytes,
                                      const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_host_batch_map(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error);

/* ---- buffers ---- */

/* How many bytes from `offset` on can be copied in one go: up to the end of the piece, or of the buffer. Waits until they
 * are prefaulted, and pins them unless another thread does. What `wait` says; what has failed the batch;
 * TMS_INVALID_STATE after the batch was destroyed early, or at exit. */
tms_status_t tms_host_buffer_await(tms_host_buffer_t *buffer, uint64_t offset, tms_wait_t *wait, uint64_t *bytes,
                                   const tms_error_context_t *context, tms_error_t *error);
/* Whether the piece there is pinned: one that has been awaited is not where the driver refused that. */
bool tms_host_buffer_is_pinned(tms_host_buffer_t *buffer, uint64_t offset);
void tms_host_buffer_acquire(tms_host_buffer_t *buffer);
void tms_host_buffer_drop(tms_host_buffer_t *buffer); /* NULL is fine; calls no driver */

#endif
