#include "core/transition/completion.h"

#include "core/allocation/free.h"
#include "core/allocation/handles.h"
#include "core/model/kinds.h"
#include "core/model/peers.h"
#include "core/transition/observers.h"

/* Under the lock: adds a segment that was paused or resumed to the facts that the observers read. */
static void note_moved(tms_transition_t *t, const tms_segment_t *segment) {
    tms_transition_notes_t *notes = &t->done.notes;
    const tms_backup_t *backup = &segment->backup;
    const tms_backup_stores_t *stores = &t->saver->stores;
    t->done.report.allocations++;
    t->done.report.bytes += tms_segment_reserved(segment);
    tms_tag_bytes_add(&notes->moved, segment->tag, tms_segment_reserved(segment));
    if (t->requested.to != TMS_SEGMENT_PAUSED) return;
    if (!backup->saved)
        notes->dropped_bytes += backup->bytes;
    else
        notes->kept_bytes[tms_backup_stores_find(stores, backup->held.kind) - stores->list] += backup->held.bytes;
}

/* Under the lock: gives a segment its final state. `moved`: the call has succeeded. */
static void settle(tms_transition_t *t, tms_account_moves_t *moves, tms_segment_t *segment, bool moved) {
    const bool was_active = t->requested.from == TMS_SEGMENT_ACTIVE;
    if (segment->run && segment->run->taken_over) moved = false; /* the pause has left its memory as it is */
    /* A pause that has succeeded and a resume that has failed leave no memory. */
    const bool ends_without_memory = was_active ? moved : !moved;
    const bool damaged = ends_without_memory && tms_segment_has_memory(segment);
    if (moved && was_active && tms_segment_lacks_contents(segment))
        atomic_fetch_add_explicit(&segment->tag->discards, 1, memory_order_relaxed);
    if (!tms_segment_has_memory(segment)) tms_run_detach(segment);
    tms_account_move(moves, segment, damaged ? TMS_SEGMENT_DAMAGED : moved ? t->requested.to : t->requested.from);
    if (moved && !damaged) note_moved(t, segment);
}

/* Counts one pause for each tag that it changed. The first segment of a tag marks it. */
static void advance_epochs(tms_transition_t *t) {
    uint64_t counted = ++t->saver->marks;
    TMS_FOR_EACH(segment, t) {
        t->saver->steps++;
        if (segment->tag->mark == counted) continue;
        segment->tag->mark = counted;
        atomic_fetch_add_explicit(&segment->tag->pause_epoch, 1, memory_order_relaxed);
    }
}

/* Makes the kinds of the resumed segments count from now on how much of their memory is freed. */
static void note_resumed(const tms_transition_t *t) {
    TMS_FOR_EACH(segment, t) tms_kind_begin_resumed(segment);
    TMS_FOR_EACH(segment, t) tms_kind_note_resumed(segment);
}

void tms_completion_finish(tms_transition_t *t, bool moved) {
    tms_segment_t *freed = NULL;
    tms_account_moves_t moves = {
        .account = &t->saver->account, .call = t->call, .operation = t->requested.operation, .now = tms_wait_now()};
    if (tms_shared_page_is_open(&t->saver->shared_page)) moves.outcome = tms_observers_outcome(t, moved);
    pthread_mutex_lock(&t->saver->lock);
    if (moved && t->requested.from == TMS_SEGMENT_ACTIVE) advance_epochs(t);
    if (moved && t->requested.to == TMS_SEGMENT_ACTIVE) note_resumed(t);
    for (tms_segment_t *next, *segment = t->planned.first; segment; segment = next) {
        next = segment->next_in_transition;
        settle(t, &moves, segment, moved);
        if (!segment->free_requested) continue;
        tms_account_record_moves(&moves);
        tms_saver_unpublish(t->saver, segment);
        tms_handles_hand_over(t->saver, segment);
        segment->next_in_transition = freed;
        freed = segment;
    }
    const bool ends_without_memory = t->requested.from == TMS_SEGMENT_ACTIVE ? moved : !moved;
    tms_free_disown_runs(t->saver, t->planned.runs, ends_without_memory, &freed);
    t->planned.runs = NULL;
    tms_account_record_moves(&moves);
    tms_observers_notify(t, TMS_MOVES_END);
    t->planned.first = NULL;
    bool skipped = tms_peers_note_skipped(t->saver, t->planned.peers_seen);
    t->saver->peers.skip_limit = 0; /* the segment that failed may be PAUSED or freed now */
    pthread_mutex_unlock(&t->saver->lock);
    /* A cancelled call does not wait for segments freed during it; a later call does. */
    tms_wait_t *wait = t->wait.cancelled ? &t->wait : NULL;
    for (tms_segment_t *next, *segment = freed; segment; segment = next) {
        next = segment->next_in_transition;
        tms_free_retire(t->saver, segment, wait);
    }
    if (skipped) {
        tms_error_t reason;
        tms_saver_log_peer_failure(t->saver, tms_peers_refresh(t->saver, &reason), &reason);
    }
}
