#include "core/transition/compact.h"

#include "core/transition/pause.h"
#include "core/transition/resume.h"

/* The selection without what is not about a compaction. */
static tms_selection_t part_of(const tms_selection_t *selection) {
    tms_selection_t part = *selection;
    part.has_backup = part.exclusive = part.zero = part.preserves = 0;
    part.host_policy = TMS_HOST_DEFAULT;
    part.timeout_seconds = 0;
    return part;
}

tms_status_t tms_transition_compact(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                    tms_error_t *error) {
    tms_selection_t pause = part_of(selection), resume = part_of(selection);
    tms_report_t paused = {0}, resumed = {0};
    uint64_t slack_bytes = 0;
    pause.has_backup = 1;
    pause.backup = TMS_BACKUP_PINNED;
    /* Half a compaction leaves the memory paused, so the second half is not cancelled. */
    resume.interrupted = NULL;
    resume.find_live = NULL;
    pthread_mutex_lock(&saver->lock);
    const uint64_t compaction = ++saver->compactions;
    pthread_mutex_unlock(&saver->lock);
    tms_status_t status = tms_transition_pause_slack(saver, &pause, compaction, &slack_bytes, &paused, error);
    if (status != TMS_OK && slack_bytes == 0) return status; /* no run was released */
    /* The first failure is the one to report. */
    tms_status_t back =
        tms_transition_resume_compacted(saver, &resume, compaction, &resumed, status == TMS_OK ? error : NULL);
    if (back != TMS_OK && error)
        tms_error_append(error, " This was to end a compaction: what it has paused stays paused, with its contents in host "
                                "memory, and resume(tag) brings it back.");
    else if (status != TMS_OK && error)
        tms_error_append(error, " The compaction has resumed those.");
    if (status == TMS_OK) status = back;
    if (status == TMS_OK && report) {
        *report = resumed;
        report->bytes = slack_bytes;
        report->seconds += paused.seconds;
        report->unknown_tags = paused.unknown_tags;
    }
    return status;
}
