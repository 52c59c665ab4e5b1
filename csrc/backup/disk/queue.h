/* A queue of requests, several in flight: direct I/O by an io_uring, if the kernel allows one; the rest by threads, because
 * one core is too slow at copying to and from the page cache.
 *
 * If the kernel rejects a submission, later requests go to the threads. Used by one thread; no lock. */
#ifndef TMS_DISK_QUEUE_H
#define TMS_DISK_QUEUE_H

#include "backup/disk/uring.h"
#include "backup/disk/workers.h"

typedef struct tms_disk_queue {
    tms_disk_uring_t *uring; /* owned and closed by the caller; NULL: none */
    bool is_open;            /* opening it has been attempted */
    bool refuses;            /* it gets no more requests */
    int in_kernel;           /* requests in flight there */
    tms_disk_directory_t *directory;
    tms_disk_workers_t workers;
} tms_disk_queue_t;

/* `uring` is closed, and opened at first use. NULL: threads only. */
void tms_disk_queue_open(tms_disk_queue_t *queue, tms_disk_uring_t *uring, tms_disk_directory_t *directory);
/* Submits a request. At most TMS_DISK_URING_ENTRIES may be in flight. */
void tms_disk_queue_submit(tms_disk_queue_t *queue, tms_disk_request_t *request);
/* The number of requests in flight in the kernel. */
int tms_disk_queue_in_kernel(tms_disk_queue_t *queue);
/* Whether the kernel has completed this request. */
static inline bool tms_disk_queue_kernel_has_done(const tms_disk_request_t *request) {
    return request->performer == TMS_DISK_BY_KERNEL && request->arrived;
}
/* Waits until the kernel has completed another request. May return early. TMS_INTERRUPTED if `wait` was cancelled. */
tms_status_t tms_disk_queue_wait(tms_disk_queue_t *queue, tms_wait_t *wait, const tms_error_context_t *context,
                                 tms_error_t *error);
/* Waits until the request is done; `request->status` is valid then. TMS_INTERRUPTED if `wait` was cancelled: the request is
 * still in flight. */
tms_status_t tms_disk_queue_await(tms_disk_queue_t *queue, tms_disk_request_t *request, tms_wait_t *wait,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Drops the requests that have not begun and waits for the others. */
void tms_disk_queue_close(tms_disk_queue_t *queue);

#endif
