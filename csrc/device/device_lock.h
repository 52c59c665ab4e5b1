/* The cooperative lock of each GPU, for resume(exclusive=True): processes that use a GPU in turns.
 *
 * Each GPU has one file (lock_file.h), locked with flock. The file is named after the GPU's UUID, so it is the same for
 * every process, regardless of CUDA_VISIBLE_DEVICES. The kernel releases the lock when its holder ends, in any way. The file
 * is never removed, because unlinking a locked file would let a second process lock a new file of that name. Processes that
 * wait are served in the order in which they came (device_queue.h).
 *
 * A file that is removed or replaced nevertheless is detected. A waiting process opens the file again at each attempt. The
 * holder checks when it acquires again: it then locks the new file, or fails if another process holds that. A holder that
 * detects it when it releases its last count logs a warning. Each file contains its holder's process id, for messages only.
 *
 * A process holds the lock of a device while its count is not 0. A resume (resume.c) acquires one count for each device
 * concerned. When it succeeds, it adds one count for each segment that it resumed (tms_device_locks_retain) and marks the
 * segment `exclusive`. In any case it releases the call's own counts. A segment's count is released when the segment is
 * paused or freed (free.c).
 *
 * `mutex` is a leaf. It guards counts, descriptors and tickets. It is held while files are opened and tried, never while
 * waiting and never across a driver call. Any thread. */
#ifndef TMS_DEVICE_LOCK_H
#define TMS_DEVICE_LOCK_H

#include <pthread.h>

#include "base/config.h"
#include "device/device.h"
#include "device/device_queue.h"
#include "device/wait.h"

typedef struct tms_device_lock {
    int fd;         /* open and flock'ed while count is not 0 */
    uint64_t count; /* number of holds: calls and segments */
    char uuid[TMS_UUID_BYTES];
} tms_device_lock_t;

typedef struct tms_device_locks {
    pthread_mutex_t mutex;
    tms_devices_t *devices;
    const char *directory; /* owned by the configuration; "": the default */
    tms_device_lock_t device[TMS_MAX_DEVICES];
    tms_device_queue_t queue;
} tms_device_locks_t;

/* Opens no file. */
tms_status_t tms_device_locks_init(tms_device_locks_t *locks, const tms_config_t *config, tms_devices_t *devices,
                                   tms_error_t *error);
void tms_device_locks_destroy(tms_device_locks_t *locks); /* releases all locks */
/* In a forked child, with `mutex` locked before the fork: closes the copies of the descriptors, so that the locks belong to
 * the parent alone. */
void tms_device_locks_after_fork_in_child(tms_device_locks_t *locks);

/* Adds one count for every device of the mask or, on failure, for none. Locks in order of UUID, and releases the acquired
 * locks while it waits for another, so that two processes cannot deadlock. Waits as `wait` allows (NULL: not at all, and
 * not past requests that wait).
 * TMS_DEVICE_LOCKED at the deadline; TMS_INTERRUPTED; TMS_INVALID_STATE, with errno, for an unusable directory or file; the
 * driver's error if a UUID cannot be read. A mask of 0 succeeds at once. */
tms_status_t tms_device_locks_acquire(tms_device_locks_t *locks, tms_device_mask_t devices, tms_wait_t *wait,
                                      const tms_error_context_t *context, tms_error_t *error);
/* Adds one count for a device whose lock is held. Cannot fail. */
void tms_device_locks_retain(tms_device_locks_t *locks, int device);
/* Removes one count for every device of the mask; the last one releases the lock. */
void tms_device_locks_release(tms_device_locks_t *locks, tms_device_mask_t devices);

#endif
