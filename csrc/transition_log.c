/* The log's line about a pause or resume. Declared in transition_call.h. */

#include "transition_call.h"

void tms_transition_note(tms_transition_t *t, const tms_segment_t *segment) {
    tms_transition_notes_t *notes = &t->notes;
    const tms_backup_t *backup = &segment->backup;
    tms_tag_bytes_add(&notes->moved, segment->tag, tms_segment_reserved(segment));
    if (t->to != TMS_SEGMENT_PAUSED) return;
    if (!backup->saved)
        notes->dropped_bytes += backup->bytes;
    else if (backup->held.kind == TMS_BACKUP_DISK)
        notes->disk_bytes += backup->held.bytes;
    else
        notes->host_bytes += backup->held.bytes;
}

/* Adds ", <bytes> <what>" where there are some. */
static void append_part(tms_error_t *line, uint64_t bytes, const char *what) {
    if (!bytes) return;
    tms_error_append(line, ", ");
    tms_error_append_bytes(line, bytes);
    tms_error_append(line, " %s", what);
}

void tms_transition_log(const tms_transition_t *t) {
    const tms_stats_t *stats = &t->saver->stats;
    const tms_transition_notes_t *notes = &t->notes;
    unsigned long long allocations = t->report.allocations;
    tms_error_t line; /* no error: it is the way to put a message together */
    if (!tms_log_enabled(t->saver->log, TMS_LOG_INFO)) return;
    tms_error_clear(&line);
    tms_error_append(&line, "%s: %llu allocation%s, ", t->operation, allocations, allocations == 1 ? "" : "s");
    tms_error_append_bytes(&line, t->report.bytes);
    tms_error_append(&line, ", in %.3f seconds", t->report.seconds);
    append_part(&line, notes->host_bytes, "of contents to host memory");
    append_part(&line, notes->disk_bytes, "of contents to disk");
    append_part(&line, notes->dropped_bytes, "of contents dropped");
    if (t->to == TMS_SEGMENT_ACTIVE) append_part(&line, t->report.copied_bytes, "of contents from backups");
    tms_error_append(&line, "; now ");
    tms_error_append_bytes(&line, tms_stats_read(&stats->resident_bytes));
    tms_error_append(&line, " are resident and ");
    tms_error_append_bytes(&line, tms_stats_read(&stats->paused_bytes));
    tms_error_append(&line, " paused");
    if (notes->moved.named) tms_error_append(&line, "; by tag: ");
    tms_tag_bytes_append(&notes->moved, &line);
    tms_log_write(t->saver->log, TMS_LOG_INFO, "%s", line.message);
}
