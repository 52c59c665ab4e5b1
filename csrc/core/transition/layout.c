#include "core/transition/layout.h"

#include "core/model/kinds.h"

/* ---- the plan ---- */

/* Returns the segment that owns a span, if it may share a run with its neighbours there, else NULL. */
static tms_segment_t *companion(const tms_transition_t *t, const tms_span_t *span) {
    tms_segment_t *other = span ? span->owner : NULL;
    bool fits = other && other->state == t->requested.through && tms_kind_shares_handles(other);
    return fits ? other : NULL;
}

/* Places a segment together with all neighbours that may share a run with it, from the first of them on. */
static void place_neighbours(const tms_transition_t *t, tms_segment_t *segment) {
    tms_segment_t *leader = segment, *last = segment;
    if (tms_kind_shares_handles(segment)) {
        for (tms_segment_t *before; (before = companion(t, leader->span->before));) leader = before;
    }
    last = leader;
    last->placement.leader = leader;
    while (tms_kind_shares_handles(last)) {
        tms_segment_t *next = companion(t, last->span->after);
        if (!next) return;
        if (next->node.end - leader->node.begin > TMS_MAX_RUN_BYTES)
            leader = next;
        else
            last->placement.next = next;
        next->placement.leader = leader;
        last = next;
    }
}

void tms_layout_plan(tms_transition_t *t) {
    TMS_FOR_EACH(segment, t) segment->placement = (tms_placement_t){.leader = NULL};
    pthread_mutex_lock(&t->saver->lock); /* other threads cut and merge neighbouring spans */
    TMS_FOR_EACH(segment, t) {
        if (!segment->placement.leader) place_neighbours(t, segment);
    }
    pthread_mutex_unlock(&t->saver->lock);
}

/* ---- the run of a device's part ---- */

const tms_segment_t *tms_layout_last(const tms_segment_t *leader) {
    const tms_segment_t *last = leader;
    while (last->placement.next) last = last->placement.next;
    return last;
}

void tms_layout_occupy(tms_transition_t *t, tms_segment_t *leader, tms_run_t *run) {
    pthread_mutex_lock(&t->saver->lock);
    for (tms_segment_t *segment = leader; segment; segment = segment->placement.next) tms_run_attach(run, segment);
    tms_run_own(run, &t->planned.runs);
    pthread_mutex_unlock(&t->saver->lock);
}

bool tms_layout_halve(tms_segment_t *leader) {
    tms_segment_t *middle = leader;
    bool odd = false;
    for (const tms_segment_t *end = leader->placement.next; end; end = end->placement.next) {
        if (odd) middle = middle->placement.next;
        odd = !odd;
    }
    tms_segment_t *second = middle->placement.next;
    if (!second) return false;
    middle->placement.next = NULL;
    for (tms_segment_t *segment = second; segment; segment = segment->placement.next) segment->placement.leader = second;
    return true;
}
