/* Threads that perform requests (backup/disk/transfer.h) that an io_uring does not.
 *
 * Each of the first requests starts a thread, up to TMS_MAX_DISK_WORKERS. If none can be started, the caller's thread does
 * the work. The threads make no driver calls, and end when the workers are closed.
 *
 * Lock: `lock` is a leaf, not held while a request is performed. One thread submits and awaits the requests. */
#ifndef TMS_DISK_WORKERS_H
#define TMS_DISK_WORKERS_H

#include <pthread.h>

#include "backup/disk/transfer.h"
#include "base/log.h"
#include "device/wait.h"

enum { TMS_MAX_DISK_WORKERS = 4 };

typedef struct tms_disk_workers {
    pthread_mutex_t lock;
    pthread_cond_t submitted, finished;
    const tms_log_t *log;
    tms_disk_request_t *first, **end; /* submitted, not begun */
    bool closing;
    bool refused; /* a thread could not be started */
    int count;
    pthread_t threads[TMS_MAX_DISK_WORKERS];
} tms_disk_workers_t;

void tms_disk_workers_open(tms_disk_workers_t *workers, const tms_log_t *log);
void tms_disk_workers_submit(tms_disk_workers_t *workers, tms_disk_request_t *request);
/* Waits until the request is done. TMS_INTERRUPTED if `wait` was cancelled. */
tms_status_t tms_disk_workers_await(tms_disk_workers_t *workers, tms_disk_request_t *request, tms_wait_t *wait,
                                    const tms_error_context_t *context, tms_error_t *error);
/* Drops the requests that have not begun, waits for the others, and ends the threads. */
void tms_disk_workers_close(tms_disk_workers_t *workers);

#endif
