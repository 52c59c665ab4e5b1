/* Kinds of allocations: a tag, a backup choice and a device. Allocations of one kind lie side by side, and neighbours that a
 * resume brings back together may share a run (core/run.h).
 *
 * A kind also knows whether runs suit it. They do not suit a tag that frees parts of itself between a resume and a pause,
 * because a run keeps the memory of a freed part. So a kind that leaves more than an eighth of its bytes as slack gets a
 * handle a segment at its next resumes, until it was quiet for TMS_KIND_QUIET_CYCLES. One whose slack was in the way of an
 * allocation or a resume gets no runs any more: it fails once at most where a handle a segment would not.
 *
 * Part of the saver. Any thread, under its lock. Kinds live as long as the saver. */
#ifndef TMS_KINDS_H
#define TMS_KINDS_H

#include "core/saver.h"

/* The most slack that a kind may leave at a pause, as the divisor of its bytes. */
enum { TMS_KIND_SLACK_DIVISOR = 8, TMS_KIND_QUIET_CYCLES = 2 };

typedef struct tms_kind {
    tms_space_t space; /* first: its addresses */
    tms_tag_t *tag;
    tms_backup_kind_t backup;
    tms_host_policy_t policy;
    int device;

    bool shares;          /* one of its segments was shared with another process (export.h) */
    bool in_the_way;      /* its slack once was as much as a call lacked: no runs any more */
    uint32_t unquiet;     /* cycles that must be quiet before it gets runs again */
    tms_shared_row_t row; /* of the shared page, where its slack is counted; constant while there is any */
    uint64_t freed_bytes; /* of segments that have been resumed, since its last pause */

    uint64_t mark;         /* of the call that counts the next two */
    uint64_t paused_bytes; /* by that call */
    struct tms_kind *next_in_call;
    struct tms_kind *next_of_list, *next;
} tms_kind_t;

static inline tms_kind_t *tms_kind_of(const tms_piece_t *piece) { return (tms_kind_t *)(void *)piece->range->space; }

/* The kind on a list, NULL if there is none yet. */
tms_kind_t *tms_kinds_find(tms_kind_t *first, tms_backup_kind_t backup, tms_host_policy_t policy, int device);
/* The same for a segment; made if it is new. NULL: out of host memory. */
tms_kind_t *tms_kinds_of_segment(tms_saver_t *saver, tms_kind_t **list, const tms_segment_t *segment);
/* For tests: forgets the kinds. No segment may have addresses. */
void tms_kinds_release(tms_saver_t *saver);

/* Whether the next resume may back several of its segments by one handle. */
bool tms_kind_suits_runs(const tms_kind_t *kind);
/* A segment with memory is freed. */
void tms_kind_note_free(tms_kind_t *kind, const tms_segment_t *segment);
/* A pause has released `paused_bytes` of it. Its slack is still counted. */
void tms_kind_note_pause(tms_kind_t *kind);

/* The slack of the kinds on a list, on one device (TMS_NO_DEVICE: on all). */
uint64_t tms_kinds_slack(const tms_kind_t *first, int device);

/* For a message: adds the slack of one device, by tag, with what to do. `missing_bytes`: how much more free memory the call
 * needed. If the slack is as much, it was in the way, and its kinds get no runs any more. Does nothing without slack. Takes
 * the saver's lock. */
void tms_kinds_explain_slack(tms_saver_t *saver, int device, uint64_t missing_bytes, tms_error_t *error);

#endif
