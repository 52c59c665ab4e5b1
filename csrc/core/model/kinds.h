/* Kinds of allocations: a tag, a backup choice and a device. Allocations of one kind lie side by side, and neighbours that a
 * resume brings back together may share a run (core/model/run.h).
 *
 * A kind also decides whether neighbours share a handle (tms_kind_shares_handles). A tag that frees parts of itself between
 * a resume and a pause would keep their memory as slack, and a process that maps sent memory would map its neighbours, too.
 *
 * Part of the saver. Any thread, under its lock. Kinds live as long as the saver. */
#ifndef TMS_KINDS_H
#define TMS_KINDS_H

#include "core/model/run.h"
#include "core/model/saver.h"

/* A kind shares no handles at a resume if more than this part of it was freed since the last one. */
enum { TMS_KIND_FREED_DIVISOR = 8 };

typedef struct tms_kind {
    tms_space_t space; /* first: its addresses */
    tms_tag_t *tag;
    tms_backup_kind_t backup;
    tms_host_policy_t policy;
    int device;

    bool sent;              /* memory of it was exported to another process (export.h) */
    uint64_t resumed_bytes; /* bytes that its last resume has brought back */
    uint64_t freed_bytes;   /* the part of them that was freed while it was resident */
    tms_shared_row_t row;   /* the row of the shared page that counts its slack; constant while it has slack */
    struct tms_kind *next_of_list, *next;
} tms_kind_t;

static inline tms_kind_t *tms_kind_of(const tms_span_t *span) { return (tms_kind_t *)(void *)span->range->space; }

/* Finds a kind on a list. Returns NULL if there is none yet. */
tms_kind_t *tms_kinds_find(tms_kind_t *first, tms_backup_kind_t backup, tms_host_policy_t policy, int device);
/* Returns the kind of a segment, which is made if it is new. NULL: out of host memory. */
tms_kind_t *tms_kinds_of_segment(tms_saver_t *saver, tms_kind_t **list, const tms_segment_t *segment);
/* For tests: forgets the kinds. No segment may have addresses. */
void tms_kinds_release(tms_saver_t *saver);

/* Whether a resume may back the segment and its neighbours of the kind by one handle: unless a handle of its own was
 * requested (runs=False), the program maps it itself, memory of the kind was sent to another process, or more than an eighth
 * of it was freed since the last resume. */
bool tms_kind_shares_handles(const tms_segment_t *segment);
/* Records that a segment with memory is freed. */
void tms_kind_note_free(const tms_segment_t *segment);
/* Record that a resume has succeeded. tms_kind_begin_resumed is called for each of its segments before tms_kind_note_resumed
 * is called for any of them. */
void tms_kind_begin_resumed(const tms_segment_t *segment);
void tms_kind_note_resumed(const tms_segment_t *segment);

/* Takes a part of the kind's slack, with its run, for a segment whose size is `bytes`. Returns false if no slack fits. */
bool tms_kind_take_slack(tms_saver_t *saver, tms_kind_t *kind, tms_segment_t *segment, uint64_t bytes);
/* Turns the memory of a freed segment into slack of its run. */
void tms_kind_keep_slack(tms_saver_t *saver, tms_segment_t *segment);
/* Removes the slack of a run. Its free spans are not handed out until they are settled. */
void tms_kind_forget_slack(tms_saver_t *saver, tms_run_t *run);
/* Returns the slack of the kinds on a list, on one device (TMS_NO_DEVICE: on all). */
uint64_t tms_kinds_slack(const tms_kind_t *first, int device);

/* For the message of an out-of-memory error: adds the slack of one device, by tag, with what to do. Does nothing without
 * slack. Takes the saver's lock. */
void tms_kinds_explain_slack(tms_saver_t *saver, int device, tms_error_t *error);

#endif
