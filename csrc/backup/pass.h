/* A pass: a kernel on each device that computes the fingerprints of the contents of many segments (fingerprints.h).
 *
 * It reads device memory, and writes to host memory of its own. It is started, other work can be done, and it is finished. A
 * pass that cannot be started is only logged, and so is a kernel that has written nothing: the backups get no fresh
 * fingerprints, so that a pause copies everything, and a resume does not check what it has restored.
 *
 * Only the call that has the turn makes a pass, with no lock held, and while it owns the segments: a pause on its thread,
 * and a resume on the thread of each device's part, for the segments of that device. */
#ifndef TMS_BACKUP_PASS_H
#define TMS_BACKUP_PASS_H

#include "backup/stores.h"

/* The contents of one segment. */
typedef struct tms_pass_part {
    tms_backup_t *backup;
    const tms_backup_content_t *content;
    CUdeviceptr address;
    int device;
    uint64_t first; /* index of its first chunk among those of its device */
} tms_pass_part_t;

/* The kernel on one device. */
typedef struct tms_pass_kernel {
    tms_copier_t copier; /* not open: there is no kernel to wait for */
    tms_host_buffer_t *buffer;
    uint64_t chunks;
} tms_pass_kernel_t;

/* The purpose of the fingerprints. */
typedef enum tms_pass_purpose {
    TMS_PASS_COMPARES, /* a pause copies what has changed since the backup */
    TMS_PASS_VERIFIES, /* a resume checks what it has restored */
    TMS_PASS_NAMES     /* publish and adopt name objects of the shared store, in any memory, which the caller keeps mapped */
} tms_pass_purpose_t;

/* `stores`, `wait`, `operation` and `purpose` are the call's or those of its part; the rest is zeros at first. */
typedef struct tms_pass {
    tms_backup_stores_t *stores;
    tms_wait_t *wait;
    const char *operation;
    tms_pass_purpose_t purpose;
    tms_pass_part_t *parts;
    size_t count, capacity;
    tms_pass_kernel_t *kernels[TMS_MAX_DEVICES];
    tms_device_mask_t busy; /* devices whose kernel may still be reading after the pass has been finished */
} tms_pass_t;

/* Adds the contents of the segment at `address`: `content` of `backup`, which stays as it is until the pass is finished. If
 * memory is short, they are not added. */
void tms_pass_add(tms_pass_t *pass, tms_backup_t *backup, const tms_backup_content_t *content, CUdeviceptr address,
                  int device);
/* Queues the kernels. */
void tms_pass_start(tms_pass_t *pass);
/* Waits for the kernels, gives the backups their fresh fingerprints, and empties the pass. Fails if a device cannot be
 * waited for. */
tms_status_t tms_pass_finish(tms_pass_t *pass, tms_error_t *error);
/* Starts and finishes the pass, if there is anything to do. TMS_INTERRUPTED if `wait` was cancelled. TMS_FORKED in a child
 * that was forked during the call, where the kernels belong to the parent. */
tms_status_t tms_pass_perform(tms_pass_t *pass, tms_error_t *error);

#endif
