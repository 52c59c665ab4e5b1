/* The host store: the host memory of backups. backup/host/types.h has its shared state and the order of its files.
 *
 * Memory is allocated in blocks: one anonymous mapping each, aligned to huge pages, not inherited by a forked child, on the
 * NUMA node closest to its GPU. A block is divided into chunks of TMS_HOST_CHUNK_BYTES, which are prefaulted, pinned
 * (cuMemHostRegister, PORTABLE, in the primary context of the block's device) and released one by one. A buffer is a
 * contiguous range of a block: a part of a chunk, or any number of chunks. A copy must not cross a chunk boundary: the
 * driver rejects a range that lies in two registrations. If pinning fails, the chunk stays pageable memory: copies are
 * slower, and a warning is logged once.
 *
 * A batch is all the memory that one pause needs. Buffers are added, then the batch is started. Its chunks become usable in
 * the order of adding, while the caller copies into the first ones. Several threads prefault; a thread that waits for a
 * chunk pins it. Before each chunk is prefaulted the headroom is read again (backup/host/limit.h). A chunk that would exceed
 * it fails the batch with TMS_OUT_OF_HOST_MEMORY. The chunks of a failed batch are released when its buffers are dropped.
 *
 * Buffers are reference-counted, because a zero-copy view may outlive the backup. When the last reference is dropped, the
 * buffer's policy applies to the chunks that no other buffer overlaps. RELEASE releases them to the system. Chunks of kind
 * PINNED are released on the releasing thread, and chunks of kind MMAP there or by tms_host_store_release_now. POOL keeps
 * them, pinned, for any later buffer, within the pool's limit. Chunks that cannot be released are quarantined. Unpinning
 * waits for the device and blocks launches of other threads until then, so the thread releases one chunk at a time.
 *
 * The pool: a new buffer is placed in the pool if the pool has room. It is placed after the last buffer placed there for the
 * same device, else in the first gap that is large enough. Blocks of its own device come before blocks of other devices;
 * pinned memory is usable by every device. A gap may span several chunks of one block. The pool contains the chunks kept by
 * POOL, and all chunks of tms_host_store_reserve, even before they are usable: awaiting them waits for the reserving thread.
 * No buffer is placed in other chunks, because that would delay their release. Idle chunks (without buffers) count against
 * the pool's limit. A chunk that would exceed the limit is released. So are the last chunks of the newest blocks when the
 * limit is lowered or host memory runs short.
 *
 * Locks: the store's `lock` is a leaf. It is not held during any system or driver call. Any thread. The threads of the store
 * block all signals, and run only while they have work. */
#ifndef TMS_HOST_STORE_H
#define TMS_HOST_STORE_H

#include "backup/host/batch.h"
#include "backup/host/release.h"
#include "backup/host/room.h"

tms_status_t tms_host_store_init(tms_host_store_t *store, tms_devices_t *devices, tms_log_t *log,
                                 tms_quarantine_t *quarantine, uint64_t cap_bytes, uint64_t pool_limit_bytes,
                                 tms_error_t *error);
/* For tests: releases everything. No buffer may be left, and no other thread may use the store. Quarantined chunks may still
 * be retried afterwards. */
void tms_host_store_release(tms_host_store_t *store);
/* At exit: no thread of the store begins another driver call after this has returned. Waits until `deadline` (tms_wait_now;
 * INFINITY: none) for calls in flight: unpinning waits for the device, where a kernel may never end. Calls that are still in
 * flight then are abandoned; a later close does not wait for them. Buffers dropped later are released with the process. */
void tms_host_store_close(tms_host_store_t *store, double deadline);
/* In a forked child, with `lock` held by the forking thread: forgets everything, which belongs to the parent. */
void tms_host_store_after_fork_in_child(tms_host_store_t *store);

/* ---- the pool ---- */

/* Fills the pool to `bytes` of idle pinned memory in the background, in `device`'s context. Raises the pool's limit to at
 * least `bytes`. TMS_OUT_OF_HOST_MEMORY if the headroom is too small now; later failures are logged. */
tms_status_t tms_host_store_reserve(tms_host_store_t *store, int device, uint64_t bytes, tms_error_t *error);
/* Sets the pool's limit, and releases idle memory that exceeds it. */
void tms_host_store_set_pool_limit(tms_host_store_t *store, uint64_t bytes);
/* Releases the idle memory of the pool in the background. The limit stays. */
void tms_host_store_trim(tms_host_store_t *store);

#endif
