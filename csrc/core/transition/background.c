#include "core/transition/background.h"

#include <string.h>

#include "base/thread.h"
#include "core/model/turn.h"
#include "core/transition/resume.h"

/* The thread holds a reference to `pending`; the saver outlives the thread (tms_pending_resumes_close). */
static void *run(void *argument) {
    tms_pending_t *pending = argument;
    tms_saver_t *saver = tms_pending_saver(pending);
    tms_report_t report = {0};
    tms_error_t error;
    tms_error_clear(&error);
    tms_status_t status = tms_transition_resume_pending(saver, pending, &report, &error);
    tms_pending_end(pending, status, &report, &error);
    tms_pending_resumes_count(&saver->pending_resumes, -1);
    return NULL;
}

tms_status_t tms_pending_begin(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t **pending,
                               tms_error_t *error) {
    const tms_error_context_t context = {.operation = "resume", .device = TMS_NO_DEVICE};
    tms_pending_t *made = NULL;
    pthread_t thread;
    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status == TMS_OK && tms_turn_is_inside())
        status = tms_error_set(error, TMS_INVALID_STATE, &context, "this thread is inside pause() or resume() already");
    if (status == TMS_OK) status = tms_pending_create(saver, selection, &made, &context, error);
    if (status != TMS_OK) return status;
    tms_pending_resumes_count(&saver->pending_resumes, 1);
    int os_error = tms_thread_start(&thread, run, made);
    if (os_error == 0) {
        pthread_detach(thread);
    } else {
        tms_log_write(saver->log, TMS_LOG_WARNING,
                      "resume(wait=False): no thread could be started (pthread_create: %s), so the whole resume is done "
                      "before the call returns",
                      strerror(os_error));
        (void)run(made);
    }
    *pending = made;
    return TMS_OK;
}
