#include "backup/disk/workers.h"

#include "base/thread.h"

void tms_disk_workers_open(tms_disk_workers_t *workers, const tms_log_t *log) {
    *workers = (tms_disk_workers_t){.log = log};
    workers->end = &workers->first;
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->submitted, NULL);
    tms_wait_condition_init(&workers->finished);
}

/* Under the lock: returns the next request, or NULL once the workers are closed. */
static tms_disk_request_t *next_request(tms_disk_workers_t *workers) {
    while (!workers->first && !workers->closing) pthread_cond_wait(&workers->submitted, &workers->lock);
    tms_disk_request_t *request = workers->first;
    if (!request) return NULL;
    workers->first = request->next;
    if (!workers->first) workers->end = &workers->first;
    return request;
}

static void *work(void *argument) {
    tms_disk_workers_t *workers = argument;
    pthread_mutex_lock(&workers->lock);
    for (tms_disk_request_t *request; (request = next_request(workers));) {
        pthread_mutex_unlock(&workers->lock);
        tms_disk_request_perform(request);
        pthread_mutex_lock(&workers->lock);
        request->done = true;
        pthread_cond_signal(&workers->finished);
    }
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

static void add_thread(tms_disk_workers_t *workers) {
    int os_error = tms_thread_start(&workers->threads[workers->count], work, workers);
    workers->refused = os_error != 0;
    if (os_error == 0)
        workers->count++;
    else
        tms_log_write(workers->log, TMS_LOG_WARNING,
                      "disk backups: pthread_create failed (%s): the copy continues with %d threads", TMS_OS_TEXT(os_error),
                      workers->count);
}

void tms_disk_workers_submit(tms_disk_workers_t *workers, tms_disk_request_t *request) {
    if (workers->count < TMS_MAX_DISK_WORKERS && !workers->refused) add_thread(workers);
    request->performer = TMS_DISK_BY_WORKERS;
    request->next = NULL;
    request->done = workers->count == 0;
    if (request->done) {
        tms_disk_request_perform(request);
        return;
    }
    pthread_mutex_lock(&workers->lock);
    *workers->end = request;
    workers->end = &request->next;
    pthread_cond_signal(&workers->submitted);
    pthread_mutex_unlock(&workers->lock);
}

tms_status_t tms_disk_workers_await(tms_disk_workers_t *workers, tms_disk_request_t *request, tms_wait_t *wait,
                                    const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    for (bool done = false; !done && status == TMS_OK;) {
        pthread_mutex_lock(&workers->lock);
        if (!request->done) tms_wait_on_condition(wait, &workers->finished, &workers->lock);
        done = request->done;
        pthread_mutex_unlock(&workers->lock);
        if (!done) status = tms_wait_check(wait, context, error);
    }
    return status;
}

void tms_disk_workers_close(tms_disk_workers_t *workers) {
    pthread_mutex_lock(&workers->lock);
    workers->first = NULL;
    workers->end = &workers->first;
    workers->closing = true;
    pthread_cond_broadcast(&workers->submitted);
    pthread_mutex_unlock(&workers->lock);
    for (int i = 0; i < workers->count; i++) pthread_join(workers->threads[i], NULL);
    workers->count = 0;
    pthread_cond_destroy(&workers->finished);
    pthread_cond_destroy(&workers->submitted);
    pthread_mutex_destroy(&workers->lock);
}
