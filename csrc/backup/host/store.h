/* The host store: the memory that backups are kept in. backup/host/state.h has what its files share, and their order.
 *
 * Memory comes in blocks: one anonymous mapping each, aligned to huge pages, not inherited by a forked child, on the NUMA
 * node of its GPU where there are several. A block is divided into pieces of TMS_HOST_PIECE_BYTES, which are prefaulted,
 * pinned (cuMemHostRegister, PORTABLE, in the primary context of the block's device) and given back one by one. A buffer is
 * a contiguous range of a block, of any number of pieces or a part of one. A copy must not cross from one piece to the next:
 * the driver refuses a range that lies in two registrations. Where pinning is refused the piece stays ordinary memory:
 * copies are slower, and one log line says so.
 *
 * A batch is all the memory that one pause needs. Buffers are added, then the batch is started. Its pieces become usable in
 * the order of adding, while the caller copies into the first ones. Several threads prefault; a thread that waits for a
 * piece pins it. Before each piece is prefaulted the headroom is read again (backup/host/limit.h). A piece that would pass
 * it fails the batch with TMS_OUT_OF_HOST_MEMORY; what the batch made goes when its buffers are dropped.
 *
 * Buffers are reference-counted, because a zero-copy view may outlive them. With the last reference a buffer's policy
 * decides about the pieces that no other buffer lies in: RELEASE gives them back to the system (PINNED: on a thread of the
 * store, soon; MMAP: by tms_host_store_release_now, or by that thread), POOL keeps them, pinned, for any later buffer,
 * as long as the pool's limit allows. What cannot be given back goes to the quarantine. Unpinning waits
 * for the device and keeps other threads from launching until then, so the thread gives back one piece at a time.
 *
 * The pool: a new buffer goes first where there is room in the pool, behind the buffer that was placed there last for the
 * same device, else in the first gap that is large enough, of blocks of its own device before those of others: pinned
 * memory is usable by every device. A gap may reach over several pieces of one block. Pieces of the pool are those that were
 * given to it idle, and all of what tms_host_store_reserve makes, also before they are usable: awaiting them waits for its
 * thread. No buffer is placed in a block outside of the pool, because that would keep the block from being given back. Idle
 * pieces, those in which nothing lies, count against the pool's limit; one that would pass it is given back, and so are the
 * last pieces of the newest blocks when the limit is lowered or host memory runs short.
 *
 * Locks: the store's `lock` is a leaf; it is not held during any system or driver call. Any thread. Threads of the store
 * block all signals, and none runs unless there is something to do. */
#ifndef TMS_HOST_STORE_H
#define TMS_HOST_STORE_H

#include "backup/host/batch.h"
#include "backup/host/release.h"
#include "backup/host/room.h"

tms_status_t tms_host_store_init(tms_host_store_t *store, tms_devices_t *devices, tms_log_t *log,
                                 tms_quarantine_t *quarantine, uint64_t cap_bytes, uint64_t pool_limit_bytes,
                                 tms_error_t *error);
/* For tests: gives everything back. No buffer may be left, and no other thread be in the store. What is in the quarantine
 * may still be retried afterwards. */
void tms_host_store_release(tms_host_store_t *store);
/* At exit: no thread in the store begins another driver call after this has returned. Waits for those that are under way,
 * until `deadline` (tms_wait_now; INFINITY: none): giving pinned memory back waits for its device, where a kernel may never
 * end. What is left then is abandoned, and a later close does not wait for it. What is dropped later is left to the end of
 * the process. */
void tms_host_store_close(tms_host_store_t *store, double deadline);
/* In a forked child, with `lock` held by the forking thread: forgets everything, which is the parent's. */
void tms_host_store_after_fork_in_child(tms_host_store_t *store);

/* ---- the pool ---- */

/* Has `bytes` of idle pinned memory made ready in the background, in `device`'s context, where the pool has less.
 * TMS_OUT_OF_HOST_MEMORY if it is clear at once that this cannot be; later failures are logged. Raises the pool's limit to
 * at least `bytes`. */
tms_status_t tms_host_store_reserve(tms_host_store_t *store, int device, uint64_t bytes, tms_error_t *error);
/* Gives idle memory back until no more than `bytes` are pooled, and keeps to that from now on. */
void tms_host_store_set_pool_limit(tms_host_store_t *store, uint64_t bytes);
/* What the pool holds idle is to be given back, in the background. Its limit stays. */
void tms_host_store_trim(tms_host_store_t *store);

#endif
