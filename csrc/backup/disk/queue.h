/* Requests under way, several at a time: what goes past the page cache by an io_uring, where the kernel allows one; the rest
 * by threads, since to and from the page cache bytes are copied, which one core alone is slow at.
 *
 * What the kernel refuses in the middle (a submission) goes to the threads from then on. One thread uses a queue. */
#ifndef TMS_DISK_QUEUE_H
#define TMS_DISK_QUEUE_H

#include "backup/disk/uring.h"
#include "backup/disk/workers.h"

typedef struct tms_disk_queue {
    tms_disk_uring_t *uring; /* the caller's, who closes it; NULL: there is none */
    bool is_open;            /* it has been opened, or could not be */
    bool refuses;            /* it is given no more */
    int in_kernel;           /* requests that it has */
    tms_disk_directory_t *directory;
    tms_disk_workers_t workers;
} tms_disk_queue_t;

/* `uring` is closed, and opened when it is needed; NULL for threads alone. */
void tms_disk_queue_open(tms_disk_queue_t *queue, tms_disk_uring_t *uring, tms_disk_directory_t *directory);
/* At most TMS_DISK_URING_ENTRIES at a time. */
void tms_disk_queue_submit(tms_disk_queue_t *queue, tms_disk_request_t *request);
/* How many of them the kernel has not done yet. */
int tms_disk_queue_in_kernel(tms_disk_queue_t *queue);
/* Whether this one is among those that it has done. */
static inline bool tms_disk_queue_kernel_has_done(const tms_disk_request_t *request) {
    return request->performer == TMS_DISK_BY_KERNEL && request->arrived;
}
/* Until the kernel has done another one, of those it has. What `wait` says. */
tms_status_t tms_disk_queue_wait(tms_disk_queue_t *queue, tms_wait_t *wait, const tms_error_context_t *context,
                                 tms_error_t *error);
/* Waits until it is done; `request->status` counts then. What `wait` says: it is still under way. */
tms_status_t tms_disk_queue_await(tms_disk_queue_t *queue, tms_disk_request_t *request, tms_wait_t *wait,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Nothing is under way afterwards. What has not begun is dropped. */
void tms_disk_queue_close(tms_disk_queue_t *queue);

#endif
