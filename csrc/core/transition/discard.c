#include "core/transition/discard.h"

#include <errno.h>
#include <stdlib.h>

#include "core/model/account.h"
#include "core/transition/steps.h"

tms_status_t tms_discard_prepare(const tms_transition_t *t, tms_discard_t *discard, tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    *discard = (tms_discard_t){.most = t->planned.discard_count};
    if (discard->most == 0) return TMS_OK;
    discard->backups = calloc(discard->most, sizeof *discard->backups);
    return discard->backups ? TMS_OK : tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
}

/* Under the lock: takes the backup of a segment. The space of a damaged segment's backup stays, because a device may still
 * read it. */
static void take(tms_discard_t *discard, tms_segment_t *segment) {
    if (!tms_segment_lacks_contents(segment)) atomic_fetch_add_explicit(&segment->tag->discards, 1, memory_order_relaxed);
    if (segment->state == TMS_SEGMENT_PAUSED)
        discard->backups[discard->count++] = tms_backup_take(&segment->backup);
    else
        segment->backup.saved = false;
    segment->only_preserved = false;
}

static void take_all(tms_transition_t *t, tms_discard_t *discard, tms_tag_bytes_t *contents) {
    tms_account_moves_t moves = {.account = &t->saver->account, .call = t->call, .operation = t->requested.operation};
    pthread_mutex_lock(&t->saver->lock);
    tms_steps_begin_scan(t);
    for (tms_registry_node_t *node = t->saver->registry.first; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        if (!tms_steps_discards(t, segment) || discard->count == discard->most) continue;
        tms_tag_bytes_add(contents, segment->tag, tms_backup_held_bytes(&segment->backup));
        take(discard, segment);
        tms_account_recount(&moves, segment);
    }
    tms_account_record_moves(&moves);
    tms_shared_page_publish(&t->saver->shared_page);
    pthread_mutex_unlock(&t->saver->lock);
}

static void log_discarded(const tms_transition_t *t, const tms_tag_bytes_t *contents) {
    tms_error_t text;
    if (contents->total == 0) return;
    tms_error_clear(&text);
    tms_tag_bytes_append(contents, &text);
    tms_log_write(t->saver->log, TMS_LOG_INFO,
                  "%s: backups of memory that was paused already were discarded, so it will be resumed without contents: %s",
                  t->requested.operation, text.message);
}

void tms_discard_end(tms_transition_t *t, tms_discard_t *discard, bool succeeded) {
    tms_tag_bytes_t contents = {.named = 0};
    if (succeeded && discard->backups) {
        take_all(t, discard, &contents);
        for (size_t i = 0; i < discard->count; i++) tms_backup_destroy(&discard->backups[i], &t->saver->stores);
        tms_backup_stores_after_resume(&t->saver->stores);
        log_discarded(t, &contents);
    }
    free(discard->backups);
}
