/* The threads that copy objects through pinned memory, because a process neither maps nor registers an object that it
 * writes, and because an object may not be registered yet when its contents are needed.
 *
 * A lane is a stream and a buffer of TMS_SHARED_LANE_BYTES. It moves one object at a time: copy, wait, write; or read, copy,
 * wait. Several lanes keep the bus busy. Writers of one file exclude each other, so an object is never shared by two lanes.
 * The buffers come from the pool of host memory, and go back to it.
 *
 * A ring belongs to the copier of one device's part of a call, and is used by its thread. The threads end before run
 * returns. No lock is held. */
#ifndef TMS_SHARED_RING_H
#define TMS_SHARED_RING_H

#include "backup/shared/types.h"

#define TMS_SHARED_LANE_BYTES ((uint64_t)8 << 20)
enum { TMS_MAX_SHARED_LANES = 16 };

typedef struct tms_shared_lane {
    tms_copier_t copier; /* not interruptible: it copies at most a buffer at a time */
    tms_host_buffer_t *buffer;
    const _Atomic bool *cancelled; /* the lane checks this between two buffers */
} tms_shared_lane_t;

/* The work for one object; called on the thread of the lane. */
typedef tms_status_t (*tms_shared_work_t)(void *context, size_t index, tms_shared_lane_t *lane, tms_error_t *error);

/* Calls work(context, index) for each of `count` indexes once, on as many threads as useful, in any order that begins at
 * `first`. Returns the first failure, after which no other begins. `copier` is the part's: its `wait` is asked for
 * cancellation, and its `done` counts. TMS_INTERRUPTED, TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_shared_ring_perform(tms_shared_store_t *store, tms_copier_t *copier, size_t count, size_t first,
                                     tms_shared_work_t work, void *context, const tms_error_context_t *where,
                                     tms_error_t *error);

/* For the work: move the contents of an object between the device and its file. Reading a file costs no page faults; if it
 * was deleted, its mapping is read. */
tms_status_t tms_shared_lane_write(tms_shared_lane_t *lane, tms_shared_store_t *store, const tms_shared_object_t *object,
                                   CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_shared_lane_read(tms_shared_lane_t *lane, tms_shared_store_t *store, const tms_shared_object_t *object,
                                  CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);

#endif
