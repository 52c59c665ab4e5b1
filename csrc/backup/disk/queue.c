#include "backup/disk/queue.h"

#include <errno.h>

/* The errors of a missing or forbidden io_uring, common in containers. */
static bool is_usual(int os_error) { return os_error == ENOSYS || os_error == EPERM || os_error == EACCES; }

void tms_disk_queue_open(tms_disk_queue_t *queue, tms_disk_uring_t *uring, tms_disk_directory_t *directory) {
    *queue = (tms_disk_queue_t){.uring = uring, .refuses = !uring, .directory = directory};
    tms_disk_workers_open(&queue->workers, directory->log);
}

/* Whether a request can be submitted to the kernel. */
static bool is_ready(tms_disk_queue_t *queue) {
    if (queue->refuses || queue->is_open) return !queue->refuses;
    const char *call = NULL;
    int os_error = tms_disk_uring_open(queue->uring, &call);
    queue->is_open = true;
    queue->refuses = os_error != 0;
    if (os_error == 0) return true;
    tms_disk_directory_t *directory = queue->directory;
    if (is_usual(os_error))
        tms_log_once(directory->log, &directory->warned_no_uring, TMS_LOG_INFO,
                     "io_uring is not available (%s: %s): disk backups are transferred by threads", call,
                     TMS_OS_TEXT(os_error));
    else
        tms_log_write(directory->log, TMS_LOG_WARNING, "%s failed (%s): disk backups are transferred by threads", call,
                      TMS_OS_TEXT(os_error));
    return false;
}

static bool submit_to_kernel(tms_disk_queue_t *queue, tms_disk_request_t *request) {
    uint64_t part = tms_disk_request_part(request);
    if (part == 0 || part > INT32_MAX || !is_ready(queue)) return false;
    tms_disk_request_begin(request);
    int os_error = tms_disk_uring_submit(queue->uring, request->handle->write, request->handle->direct_fd, request->data,
                                         (uint32_t)part, request->offset, request);
    if (os_error == 0) {
        request->performer = TMS_DISK_BY_KERNEL;
        request->arrived = request->done = false;
        queue->in_kernel++;
        return true;
    }
    queue->refuses = true;
    tms_log_write(queue->directory->log, TMS_LOG_WARNING,
                  "io_uring_enter failed (%s): the other disk backups of this call are transferred by threads",
                  TMS_OS_TEXT(os_error));
    return false;
}

void tms_disk_queue_submit(tms_disk_queue_t *queue, tms_disk_request_t *request) {
    if (submit_to_kernel(queue, request)) return;
    if (request->bytes >= TMS_DISK_ALIGNMENT) {
        tms_disk_workers_submit(&queue->workers, request);
        return;
    }
    request->performer = TMS_DISK_BY_CALLER; /* too small for a thread */
    tms_disk_request_perform(request);
    request->done = true;
}

static void take_arrived(tms_disk_queue_t *queue) {
    void *tag = NULL;
    int result = 0;
    while (queue->in_kernel > 0 && tms_disk_uring_take(queue->uring, &tag, &result)) {
        tms_disk_request_t *request = tag;
        request->result = result;
        request->arrived = true;
        queue->in_kernel--;
    }
}

int tms_disk_queue_in_kernel(tms_disk_queue_t *queue) {
    take_arrived(queue);
    return queue->in_kernel;
}

tms_status_t tms_disk_queue_wait(tms_disk_queue_t *queue, tms_wait_t *wait, const tms_error_context_t *context,
                                 tms_error_t *error) {
    tms_disk_uring_wait(queue->uring, TMS_WAIT_POLL_SECONDS);
    take_arrived(queue);
    return tms_wait_check(wait, context, error);
}

tms_status_t tms_disk_queue_await(tms_disk_queue_t *queue, tms_disk_request_t *request, tms_wait_t *wait,
                                  const tms_error_context_t *context, tms_error_t *error) {
    if (request->performer == TMS_DISK_BY_WORKERS)
        return tms_disk_workers_await(&queue->workers, request, wait, context, error);
    if (request->done) return TMS_OK;
    take_arrived(queue);
    while (!request->arrived) {
        tms_status_t status = tms_disk_queue_wait(queue, wait, context, error);
        if (status != TMS_OK) return status;
    }
    /* After a failure the calling thread retries, which gives the final result. */
    tms_disk_request_end(request, request->result > 0 ? (uint64_t)request->result : 0);
    request->done = true;
    return TMS_OK;
}

void tms_disk_queue_close(tms_disk_queue_t *queue) {
    tms_disk_workers_close(&queue->workers);
    for (take_arrived(queue); queue->in_kernel > 0; take_arrived(queue))
        tms_disk_uring_wait(queue->uring, TMS_WAIT_POLL_SECONDS);
}
