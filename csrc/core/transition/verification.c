#include "core/transition/verification.h"

#include <errno.h>
#include <stdlib.h>

#include "core/transition/crew.h"
#include "core/transition/save.h"

/* Whether the backup was copied in part, and is compared here. Each resume compares the contents of a store that plans
 * by fingerprint. */
static bool is_compared(const tms_transition_t *t, const tms_segment_t *segment) {
    return segment->backup.partial && segment->run->releasing &&
           tms_backup_can_compare(&t->saver->stores, segment->backup.planned.kind);
}

/* Plans to copy the contents of the segments whose backup was copied in part. `copies` has one for each segment on the list;
 * the others stay empty. */
static tms_status_t plan_all(tms_transition_t *t, tms_backup_t *copies, const tms_live_t *live, tms_device_mask_t *copying,
                             tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_backup_t *copy = copies;
    TMS_FOR_EACH(segment, t) {
        *copy = (tms_backup_t){.bytes = segment->bytes};
        segment->target = copy;
        tms_status_t status = TMS_OK;
        if (is_compared(t, segment)) {
            status = tms_save_choose(t, segment, copy, TMS_BACKUP_PINNED, live, error);
            if (status == TMS_OK) status = tms_save_plan(t, segment, TMS_HOST_RELEASE, copying, error);
        }
        if (status != TMS_OK) return status;
        copy++;
    }
    return tms_backup_batch_start(&t->saver->stores, &t->planned.batch, &context, error);
}

/* Makes the call copy all contents of a segment whose backup is damaged. */
static void plan_again(tms_transition_t *t, tms_segment_t *segment, tms_device_mask_t *damaged, const tms_error_t *reason) {
    tms_backup_t *backup = &segment->backup;
    const uint64_t more = backup->planned.bytes - tms_backup_copied(backup)->bytes;
    tms_log_recurring(t->saver->log, TMS_LOG_WRITTEN_AGAIN, TMS_LOG_WARNING, reason,
                      "The contents are still on the device, so this pause writes them to the file again.");
    tms_backup_copy_all(backup);
    t->planned.total_bytes += more;
    t->planned.unchanged_bytes -= more;
    segment->target = backup;
    *damaged |= (tms_device_mask_t)1 << segment->device;
}

static tms_status_t compare(tms_transition_t *t, tms_segment_t *segment, const tms_backup_t *copy,
                            tms_device_mask_t *damaged, tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context_of(t, segment);
    tms_error_t reason;
    bool differs = false;
    uint64_t place = 0;
    tms_status_t status =
        tms_backup_compare(&segment->backup, copy, &t->saver->stores, &differs, &place, &t->wait, &context, &reason);
    if (status == TMS_BACKUP_IO) {
        plan_again(t, segment, damaged, &reason);
        return TMS_OK;
    }
    if (status != TMS_OK && error) *error = reason;
    if (status != TMS_OK || !differs) return status;
    segment->backup.saved = false;
    return tms_error_set(
        error, TMS_INVALID_STATE, &context,
        "the backup has another byte %llu than the device, although its fingerprint has not changed. Nothing "
        "was released. Report this as a bug",
        (unsigned long long)place);
}

/* *damaged becomes the devices of segments whose backups are to be written again. The copies are empty afterwards, as
 * targets of another copy. */
static tms_status_t compare_all(tms_transition_t *t, tms_backup_t *copies, tms_device_mask_t *damaged, tms_error_t *error) {
    tms_backup_t *copy = copies;
    tms_status_t first = TMS_OK;
    TMS_FOR_EACH(segment, t) {
        tms_backup_commit(copy, &t->saver->stores);
        tms_status_t status = TMS_OK;
        if (is_compared(t, segment)) status = compare(t, segment, copy, damaged, first == TMS_OK ? error : NULL);
        if (first == TMS_OK) first = status;
        copy++;
    }
    return first;
}

tms_status_t tms_verification_check(tms_transition_t *t, const tms_live_t *live, tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    const uint64_t total = t->planned.total_bytes;
    tms_device_mask_t copying = 0, damaged = 0;
    size_t count = 0;
    TMS_FOR_EACH(segment, t) count++;
    tms_backup_t *copies = calloc(count + 1, sizeof *copies);
    if (!copies) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    tms_status_t status = plan_all(t, copies, live, &copying, error);
    if (status == TMS_OK) status = tms_crew_perform(t, copying, tms_save_copy, error);
    if (status == TMS_FORKED) goto forget; /* in a forked child: the copies belong to the parent */
    tms_backup_batch_end(&t->saver->stores, &t->planned.batch);
    if (status == TMS_OK) status = compare_all(t, copies, &damaged, error);
    if (status == TMS_OK) status = tms_crew_perform(t, damaged, tms_save_copy, error);
    if (status == TMS_FORKED) goto forget;
    atomic_fetch_add(&t->done.copied_bytes, t->planned.total_bytes - total);
    for (size_t i = 0; i < count; i++) tms_backup_destroy(&copies[i], &t->saver->stores);
forget:
    free(copies);
    return status;
}
