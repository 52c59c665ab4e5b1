#include "core/transition/log.h"

void tms_transition_note(tms_transition_t *t, const tms_segment_t *segment) {
    tms_transition_notes_t *notes = &t->done.notes;
    const tms_backup_t *backup = &segment->backup;
    const tms_backup_stores_t *stores = &t->saver->stores;
    tms_tag_bytes_add(&notes->moved, segment->tag, tms_segment_reserved(segment));
    if (t->asked.to != TMS_SEGMENT_PAUSED) return;
    if (!backup->saved)
        notes->dropped_bytes += backup->bytes;
    else
        notes->kept_bytes[tms_backup_stores_find(stores, backup->held.kind) - stores->list] += backup->held.bytes;
}

/* Appends ", <bytes> of contents <where> <place>" unless `bytes` is 0. */
static void append_part(tms_error_t *line, uint64_t bytes, const char *where, const char *place) {
    if (!bytes) return;
    tms_error_append(line, ", ");
    tms_error_append_bytes(line, bytes);
    tms_error_append(line, " of contents %s%s", where, place);
}

void tms_transition_log(const tms_transition_t *t) {
    const tms_transition_notes_t *notes = &t->done.notes;
    const tms_backup_stores_t *stores = &t->saver->stores;
    unsigned long long allocations = t->done.report.allocations;
    tms_error_t line; /* not an error: only used to build the text */
    if (!tms_log_enabled(t->saver->log, TMS_LOG_INFO)) return;
    tms_error_clear(&line);
    tms_error_append(&line, "%s: %llu allocation%s, ", t->asked.operation, allocations, allocations == 1 ? "" : "s");
    tms_error_append_bytes(&line, t->done.report.bytes);
    tms_error_append(&line, ", in %.3f seconds", t->done.report.seconds);
    for (int i = 0; i < stores->count; i++)
        append_part(&line, notes->kept_bytes[i], "to ", stores->list[i].operations->place);
    append_part(&line, t->done.report.unchanged_bytes, "unchanged since the last pause", "");
    append_part(&line, notes->dropped_bytes, "dropped", "");
    if (t->asked.to == TMS_SEGMENT_ACTIVE) append_part(&line, t->done.report.copied_bytes, "from backups", "");
    tms_error_append(&line, "; now ");
    tms_error_append_bytes(&line, tms_stats_read(&t->saver->account.mapped.now));
    tms_error_append(&line, " are resident and ");
    tms_error_append_bytes(&line, tms_stats_read(&t->saver->account.paused_bytes));
    tms_error_append(&line, " paused");
    if (notes->moved.named) tms_error_append(&line, "; by tag: ");
    tms_tag_bytes_append(&notes->moved, &line);
    tms_log_write(t->saver->log, TMS_LOG_INFO, "%s", line.message);
}
