#include "core/transition/save.h"

tms_status_t tms_save_choose(tms_transition_t *t, tms_segment_t *segment, tms_backup_t *backup, tms_backup_kind_t kind,
                             const tms_live_t *live, tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context_of(t, segment);
    segment->target = backup;
    return tms_backup_choose(backup, &t->saver->stores, &t->planned.batch, kind, live, tms_segment_address(segment),
                             &context, error);
}

tms_status_t tms_save_plan(tms_transition_t *t, tms_segment_t *segment, tms_host_policy_t policy, tms_device_mask_t *copying,
                           tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context_of(t, segment);
    const tms_backup_request_t request = {.policy = tms_saver_host_policy(t->saver, policy),
                                          .device = segment->device,
                                          .group = segment->tag,
                                          .wait = &t->wait};
    tms_backup_t *backup = segment->target;
    tms_status_t status = tms_backup_plan(backup, &t->saver->stores, &t->planned.batch, &request, &context, error);
    if (status == TMS_OK) status = tms_wait_check(&t->wait, &context, error);
    if (status != TMS_OK) return status;
    if (tms_backup_copied(backup)->bytes > 0) *copying |= (tms_device_mask_t)1 << segment->device;
    return TMS_OK;
}

/* State of prepare_ahead, which the copier calls when it would otherwise wait for the bus. */
typedef struct ahead {
    const tms_transition_t *t;
    int device;
} ahead_t;

static tms_status_t prepare_ahead(void *context, bool *more, tms_error_t *error) {
    const ahead_t *ahead = context;
    (void)error; /* a failure is reported to the thread that waits for the chunk */
    *more = tms_backup_batch_help(&ahead->t->saver->stores, &ahead->t->planned.batch, ahead->device);
    return TMS_OK;
}

tms_status_t tms_save_copy(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error) {
    return tms_save_copy_counted(t, device, NULL, wait, error);
}

tms_status_t tms_save_copy_counted(tms_transition_t *t, int device, _Atomic uint64_t *done, tms_wait_t *wait,
                                   tms_error_t *error) {
    tms_copier_t copier = {.open = false};
    tms_error_context_t context = tms_transition_context(t, device);
    tms_status_t status = tms_copier_open(&copier, &t->saver->stores.copying, device, wait, &context, error);
    copier.done = done;
    ahead_t ahead = {.t = t, .device = device};
    if (tms_backup_batch_can_help(&t->saver->stores, &t->planned.batch)) copier.on_idle = prepare_ahead;
    copier.on_idle_context = &ahead;
    TMS_FOR_EACH(segment, t) {
        if (status != TMS_OK) break;
        if (segment->device != device) continue;
        tms_error_context_t here = tms_transition_context_of(t, segment);
        status = tms_backup_save(segment->target, &t->saver->stores, &copier, tms_segment_address(segment), &here, error);
    }
    if (status == TMS_FORKED) return status; /* in a forked child: the stream and its context belong to the parent */
    if (status == TMS_OK) status = tms_copier_wait(&copier, &context, error);
    (void)tms_copier_close(&copier); /* ACTIVE memory stays mapped, and the copier keeps the host memory if necessary */
    return status;
}
