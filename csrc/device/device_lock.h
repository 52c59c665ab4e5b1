/* The cooperative lock of each GPU, behind resume(exclusive=True): processes that share a GPU in strict turns.
 *
 * One file a GPU, named after its UUID and so the same for every process whatever its CUDA_VISIBLE_DEVICES, and flock'ed:
 * the kernel drops the lock however its holder ends. The file itself stays for ever, because unlinking a locked file would
 * let a second process lock a new one of that name. The directory is TMS_LOCK_DIR, else /tmp/torch_memory_saver-<uid>
 * (XDG_RUNTIME_DIR is removed when its user's last login ends, and missing in services and containers). It is made (0700) if
 * it is missing, and refused unless it is a real directory of this user, the default one also if others can use it. Files
 * are 0600, opened without following links, and refused unless they are regular files of this user.
 *
 * A file that was removed or replaced all the same is noticed: by a process that waits, which opens it anew at each attempt,
 * and by its holder when it acquires again, which then locks the new one, or fails if another process has that. A holder
 * that finds out when it releases its last count logs a warning. Each file names its holder, for messages only.
 *
 * A process holds the lock of a device while its count is not 0. How transition.c uses it: a resume acquires the locks of
 * the devices concerned, one count a device for the call; when it succeeds it adds one count for each segment that it
 * resumed (tms_device_locks_retain, and marks the segment `exclusive`); in any case it gives the call's own count back. A
 * segment's count goes when the segment is paused, or freed (saver.c).
 *
 * `mutex` is a leaf: it guards counts and descriptors, is held across opening and trying to lock a file, never while waiting
 * and never across a driver call. Any thread. */
#ifndef TMS_DEVICE_LOCK_H
#define TMS_DEVICE_LOCK_H

#include <pthread.h>

#include "base/config.h"
#include "device/device.h"
#include "device/wait.h"

typedef struct tms_device_lock {
    int fd;         /* open and flock'ed while count is not 0 */
    uint64_t count; /* of what holds it */
} tms_device_lock_t;

typedef struct tms_device_locks {
    pthread_mutex_t mutex;
    tms_devices_t *devices;
    const char *directory; /* owned by the configuration; "": the default */
    tms_device_lock_t device[TMS_MAX_DEVICES];
} tms_device_locks_t;

/* Opens no file. */
tms_status_t tms_device_locks_init(tms_device_locks_t *locks, const tms_config_t *config, tms_devices_t *devices,
                                   tms_error_t *error);
void tms_device_locks_destroy(tms_device_locks_t *locks); /* releases everything */
/* In a forked child, with `mutex` locked before the fork: closes the copies of the descriptors, which keeps the parent's
 * locks and makes sure that they go with the parent. */
void tms_device_locks_after_fork_in_child(tms_device_locks_t *locks);

/* One more count for every device of the mask, or, on failure, for none. Takes the locks in order of UUID, and releases
 * those it has taken while it waits for another, so that two processes cannot block each other. Waits as `wait` allows
 * (NULL: not at all). TMS_DEVICE_LOCKED when time is up; TMS_INTERRUPTED; TMS_INVALID_STATE for a directory or file that
 * cannot be used, with errno; what the driver says when it is asked for UUIDs. A mask of 0 succeeds at once. */
tms_status_t tms_device_locks_acquire(tms_device_locks_t *locks, tms_device_mask_t devices, tms_wait_t *wait,
                                      const tms_error_context_t *context, tms_error_t *error);
/* One more count for one device that is held already. Cannot fail. */
void tms_device_locks_retain(tms_device_locks_t *locks, int device);
/* One count less for every device of the mask; the last one releases the lock. */
void tms_device_locks_release(tms_device_locks_t *locks, tms_device_mask_t devices);

#endif
