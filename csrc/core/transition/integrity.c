#include "core/transition/integrity.h"

#include "backup/pass.h"

static bool is_checked(const tms_transition_t *t, const tms_segment_t *segment, int device) {
    return segment->device == device && tms_backup_can_verify(&segment->backup, &t->saver->stores);
}

/* Compares the fingerprints of all checked segments. Returns the first failure. */
static tms_status_t compare_all(tms_transition_t *t, int device, tms_error_t *error) {
    tms_status_t first = TMS_OK;
    TMS_FOR_EACH(segment, t) {
        if (!is_checked(t, segment, device)) continue;
        const tms_error_context_t context = tms_transition_context_of(t, segment);
        tms_status_t status =
            tms_backup_verify(&segment->backup, &t->saver->stores, &context, first == TMS_OK ? error : NULL);
        if (first == TMS_OK) first = status;
    }
    return first;
}

tms_status_t tms_integrity_check(tms_transition_t *t, tms_copier_t *copier, tms_wait_t *wait, tms_error_t *error) {
    const int device = copier->device;
    const tms_error_context_t context = tms_transition_context(t, device);
    tms_pass_t pass = {
        .stores = &t->saver->stores, .wait = wait, .operation = t->requested.operation, .purpose = TMS_PASS_VERIFIES};
    TMS_FOR_EACH(segment, t) {
        if (is_checked(t, segment, device))
            tms_pass_add(&pass, &segment->backup, &segment->backup.held, tms_segment_address(segment), device);
    }
    if (pass.count == 0) return tms_pass_finish(&pass, error);
    tms_status_t status = tms_copier_wait(copier, &context, error);
    if (status == TMS_OK)
        status = tms_pass_perform(&pass, error);
    else
        (void)tms_pass_finish(&pass, NULL); /* no kernel has been started */
    if (status == TMS_FORKED) return status;
    atomic_fetch_or(&t->done.busy, pass.busy);
    tms_status_t compared = compare_all(t, device, status == TMS_OK ? error : NULL);
    return status == TMS_OK ? compared : status;
}
