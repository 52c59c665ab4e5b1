/* Batches, which prepare the host memory of one pause while it copies, and their buffers.
 *
 * A batch is used by the thread that made it, except for tms_host_batch_help. A buffer may be used by any thread that holds
 * a reference. Called without the store's lock. */
#ifndef TMS_HOST_BATCH_H
#define TMS_HOST_BATCH_H

#include "backup/host/types.h"
#include "device/wait.h"

/* ---- batches ---- */

/* The properties of a buffer. Buffers of one batch with equal device, kind and group share blocks, so that they are released
 * together. `group` is only compared. */
typedef struct tms_host_request {
    uint64_t bytes; /* not 0 */
    int device;
    tms_backup_kind_t kind; /* PINNED or MMAP */
    const void *group;
} tms_host_request_t;

/* Creates an empty batch. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_batch_create(struct tms_host_batch **batch, tms_host_store_t *store,
                                   const tms_error_context_t *context, tms_error_t *error);
/* Creates a buffer with one reference, which the caller owns. It lies in the pool if the pool has a large enough gap;
 * otherwise its memory is planned. Its `memory` is set once the batch has been started. */
tms_status_t tms_host_batch_add(struct tms_host_batch *batch, const tms_host_request_t *request, tms_host_buffer_t **buffer,
                                const tms_error_context_t *context, tms_error_t *error);
/* Fails with TMS_OUT_OF_HOST_MEMORY if the headroom is too small for all planned blocks. Before that it releases waiting
 * chunks and idle pooled memory. */
tms_status_t tms_host_batch_check_room(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error);
/* Checks the room, maps the planned blocks, and begins to make them usable. After a failure the caller destroys the
 * batch and drops the buffers. If no thread can be started, tms_host_buffer_await does the work. */
tms_status_t tms_host_batch_start(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error);
/* Cancels unfinished work and joins the threads; buffers stay. After a failure it is called before the buffers are dropped.
 * Accepts NULL. */
void tms_host_batch_destroy(struct tms_host_batch *batch);

/* For on_idle of a copier: pins the first prefaulted chunk of `device`. Returns false if there is no such chunk. */
bool tms_host_batch_help(struct tms_host_batch *batch, int device);
/* For tms_host_store_reserve: plan_pool plans a block without buffers for the pool; map maps the planned blocks and adds
 * them to the store. */
tms_status_t tms_host_batch_plan_pool(struct tms_host_batch *batch, int device, uint64_t bytes,
                                      const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_host_batch_map(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error);

/* The operations of one pause of a store whose batch is one of host memory. */
#define TMS_HOST_BATCH_OPERATIONS                                                                                           \
    .start = tms_host_batch_operation_start, .check_room = tms_host_batch_operation_check_room,                             \
    .help = tms_host_batch_operation_help, .end = tms_host_batch_operation_end
tms_status_t tms_host_batch_operation_start(void *batch, const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_host_batch_operation_check_room(void *batch, const tms_error_context_t *context, tms_error_t *error);
bool tms_host_batch_operation_help(void *batch, int device);
void tms_host_batch_operation_end(void *batch);

/* ---- buffers ---- */

/* *bytes: the number of bytes from `offset` that one copy may cover, up to the end of the chunk or of the buffer. Waits
 * until they are prefaulted, and pins them unless another thread does. TMS_INTERRUPTED if `wait` was cancelled; the failure
 * of the batch; TMS_INVALID_STATE if the batch was destroyed early, or at exit. */
tms_status_t tms_host_buffer_await(tms_host_buffer_t *buffer, uint64_t offset, tms_wait_t *wait, uint64_t *bytes,
                                   const tms_error_context_t *context, tms_error_t *error);
/* Whether the chunk at `offset` is pinned. A usable chunk is not pinned if the driver failed to pin it. */
bool tms_host_buffer_is_pinned(tms_host_buffer_t *buffer, uint64_t offset);
void tms_host_buffer_acquire(tms_host_buffer_t *buffer);
/* The caller gives its reference to the program, which may write to the memory. So the next pause copies everything. */
void tms_host_buffer_hand_out(tms_host_buffer_t *buffer);
void tms_host_buffer_drop(tms_host_buffer_t *buffer); /* accepts NULL; makes no driver call */

#endif
