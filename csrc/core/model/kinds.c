#include "core/model/kinds.h"

#include <stdlib.h>

#include "core/model/tag_bytes.h"

tms_kind_t *tms_kinds_find(tms_kind_t *first, tms_backup_kind_t backup, tms_host_policy_t policy, int device) {
    tms_kind_t *kind = first;
    while (kind && (kind->backup != backup || kind->policy != policy || kind->device != device)) kind = kind->next_of_list;
    return kind;
}

tms_kind_t *tms_kinds_of_segment(tms_saver_t *saver, tms_kind_t **list, const tms_segment_t *segment) {
    tms_kind_t *kind = tms_kinds_find(*list, segment->backup.kind, segment->backup.policy, segment->device);
    if (kind || !(kind = calloc(1, sizeof *kind))) return kind;
    kind->tag = segment->tag;
    kind->backup = segment->backup.kind;
    kind->policy = segment->backup.policy;
    kind->device = segment->device;
    kind->next_of_list = *list;
    *list = kind;
    kind->next = saver->kinds;
    saver->kinds = kind;
    return kind;
}

void tms_kinds_release(tms_saver_t *saver) {
    for (tms_kind_t *next, *kind = saver->kinds; kind; kind = next) {
        next = kind->next;
        free(kind);
    }
    saver->kinds = NULL;
}

/* ---- whether neighbours share a handle ---- */

bool tms_kind_shares_handles(const tms_segment_t *segment) {
    if (segment->own_handle || tms_segment_is_of_program(segment)) return false;
    const tms_kind_t *kind = tms_kind_of(segment->span);
    return !kind->sent && kind->freed_bytes <= kind->resumed_bytes / TMS_KIND_FREED_DIVISOR;
}

void tms_kind_note_free(const tms_segment_t *segment) {
    if (tms_segment_is_of_program(segment)) return;
    if (tms_segment_was_resumed(segment)) tms_kind_of(segment->span)->freed_bytes += tms_segment_reserved(segment);
}

void tms_kind_begin_resumed(const tms_segment_t *segment) {
    if (tms_segment_is_of_program(segment)) return;
    tms_kind_t *kind = tms_kind_of(segment->span);
    kind->resumed_bytes = kind->freed_bytes = 0;
}

void tms_kind_note_resumed(const tms_segment_t *segment) {
    if (tms_segment_is_of_program(segment)) return;
    tms_kind_of(segment->span)->resumed_bytes += tms_segment_reserved(segment);
}

/* ---- slack ---- */

/* Under the lock: counts a change of a kind's slack, which was `before`. The caller publishes the shared page. */
static void recount(tms_saver_t *saver, tms_kind_t *kind, uint64_t before) {
    const uint64_t change = kind->space.backed_bytes - before;
    if (change == 0) return;
    if (before == 0) kind->row = tms_shared_page_row(&saver->shared_page, kind->tag, kind->device);
    tms_stats_add(&saver->account.slack[kind->device], change);
    tms_shared_page_change(&saver->shared_page, kind->row, &(tms_shared_page_change_t){.slack_bytes = change});
}

bool tms_kind_take_slack(tms_saver_t *saver, tms_kind_t *kind, tms_segment_t *segment, uint64_t bytes) {
    const uint64_t before = kind->space.backed_bytes;
    tms_span_t *span = tms_space_take_backed(&kind->space, bytes, segment);
    if (!span) return false;
    segment->span = span;
    segment->node.begin = span->begin;
    segment->node.end = span->end;
    tms_run_t *run = span->backing;
    tms_run_attach(run, segment);
    span->backing = NULL;
    recount(saver, kind, before);
    return true;
}

void tms_kind_forget_slack(tms_saver_t *saver, tms_run_t *run) {
    if (!run->first) return;
    tms_kind_t *kind = tms_kind_of(run->first);
    const uint64_t before = kind->space.backed_bytes;
    tms_space_hold(run->first, run->end);
    tms_space_unback(run->first, run->end);
    recount(saver, kind, before);
}

void tms_kind_keep_slack(tms_saver_t *saver, tms_segment_t *segment) {
    if (tms_segment_is_of_program(segment)) return;
    tms_kind_t *kind = tms_kind_of(segment->span);
    const uint64_t before = kind->space.backed_bytes;
    tms_space_give_back(segment->span, segment->run, !segment->run->damaged);
    recount(saver, kind, before);
}

uint64_t tms_kinds_slack(const tms_kind_t *first, int device) {
    uint64_t bytes = 0;
    for (const tms_kind_t *kind = first; kind; kind = kind->next_of_list) {
        if (device == TMS_NO_DEVICE || kind->device == device) bytes += kind->space.backed_bytes;
    }
    return bytes;
}

void tms_kinds_explain_slack(tms_saver_t *saver, int device, tms_error_t *error) {
    tms_tag_bytes_t slack = {.named = 0};
    if (!error || device < 0 || device >= TMS_MAX_DEVICES || tms_stats_read(&saver->account.slack[device]) == 0) return;
    pthread_mutex_lock(&saver->lock);
    for (const tms_kind_t *kind = saver->kinds; kind; kind = kind->next) {
        if (kind->device == device && kind->space.backed_bytes > 0)
            tms_tag_bytes_add(&slack, kind->tag, kind->space.backed_bytes);
    }
    pthread_mutex_unlock(&saver->lock);
    if (slack.total == 0) return;
    tms_error_append(error, "\n- ");
    tms_error_append_bytes(error, slack.total);
    tms_error_append(error,
                     " are slack: memory of freed allocations that shares a physical handle with allocations in use. By "
                     "tag: ");
    tms_tag_bytes_append(&slack, error);
    tms_error_append(error, ". pause(tag, backup=\"host\") and resume(tag) return it and keep the contents; "
                            "allocations of region(runs=False) leave none.");
}
