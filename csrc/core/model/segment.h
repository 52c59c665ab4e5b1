/* One managed allocation: its addresses, its backup, and the run (run.h) that its physical memory is part of.
 *
 * States change under the saver's lock. A segment in a state with an owner belongs to one call (saver.h), which uses it
 * without the lock. `run` changes under that lock too, and is read without it by the owner. */
#ifndef TMS_SEGMENT_H
#define TMS_SEGMENT_H

#include "backup/backup.h"
#include "base/address_space.h"
#include "base/quarantine.h"
#include "base/registry.h"
#include "base/shared_page.h"
#include "core/model/quiesced.h"
#include "core/model/region.h"

/* The memory that a segment held when it was last counted (account.h). */
typedef struct tms_holding {
    tms_segment_state_t state;
    uint64_t resident_bytes, paused_bytes;
    uint64_t backup_bytes[TMS_MAX_BACKUP_STORES]; /* by store */
} tms_holding_t;

/* The placement of a segment in the layout that a resume plans (transition/layout.h). Read and written by its owner. */
typedef struct tms_placement {
    struct tms_segment *leader; /* the first of the neighbours that one run is to back; NULL: not placed yet */
    struct tms_segment *next;   /* the next of these neighbours, by address */
} tms_placement_t;

typedef struct tms_segment {
    tms_registry_node_t node;      /* first: [address, address + reserved size) */
    tms_quarantined_t quarantined; /* used once it has been freed, if its guard page could not be unmapped */
    tms_quiesced_t quiesced;       /* used then, for the next attempt to unmap that page */
    tms_span_t *span;              /* its addresses (model/ranges.h); NULL: they are the program's (allocation/handles.h) */
    struct tms_handle *handle; /* the program's handle that is mapped there; NULL: none, or the program has unmapped it */
    struct tms_run *run;       /* its memory; NULL: none */
    uint64_t bytes;            /* requested size */
    int device;
    tms_segment_state_t state;     /* changed by account.h only */
    bool free_requested;           /* freed while a call owned it: that call finishes the free */
    struct tms_segment *successor; /* gets its memory when that call ends (allocation/handles.h); NULL: none */
    bool exclusive;                /* holds one count of its device's lock (device_lock.h) */
    bool only_preserved;           /* the last pause has kept only preserved blocks */
    bool own_handle;               /* requested (runs=False): it is never in a run with others */
    uint64_t paused_by;            /* the mark of the last pause that took it (pending.h); 0: none */
    tms_contents_t contents;       /* where its contents are from; TMS_CONTENTS_OWN until its first resume */
    uint64_t guarded;              /* bytes from its start at which a guard page is mapped (guard.h) */
    tms_device_mask_t readers;     /* devices that may read the guard page */
    tms_placement_t placement;
    tms_tag_t *tag;
    tms_backup_t backup;
    tms_backup_t *target;                   /* where the call that owns it saves its contents (transition/save.h) */
    double allocated_at, changed_at;        /* on tms_wait_now's clock: when it was made, and when its state last changed */
    tms_holding_t counted;                  /* account.h; under the saver's lock */
    tms_shared_row_t row;                   /* the row of the shared page that counts it */
    struct tms_segment *next_in_transition; /* in the list of the call that owns it, or of deferred frees */
} tms_segment_t;

/* Whether the segment's memory is from a resume, not from its allocation. */
static inline bool tms_segment_was_resumed(const tms_segment_t *segment) { return segment->contents != TMS_CONTENTS_OWN; }

/* Whether the segment's last pause discarded contents. Free blocks that a backup skips do not count. */
static inline bool tms_segment_lacks_contents(const tms_segment_t *segment) {
    if (segment->backup.saved && !segment->only_preserved) return false;
    return tms_backup_lacks_contents(&segment->backup);
}

static inline CUdeviceptr tms_segment_address(const tms_segment_t *segment) { return segment->node.begin; }
static inline uint64_t tms_segment_reserved(const tms_segment_t *segment) { return segment->node.end - segment->node.begin; }
static inline tms_segment_t *tms_segment_of(tms_registry_node_t *node) { return (tms_segment_t *)node; }

/* Whether the program maps the segment at addresses of its own. Known from its publication on. */
static inline bool tms_segment_is_of_program(const tms_segment_t *segment) { return !segment->span; }

/* Under the saver's lock: whether a call owns the segment and uses it without the lock. */
static inline bool tms_segment_has_owner(const tms_segment_t *segment) {
    return segment->state == TMS_SEGMENT_PAUSING || segment->state == TMS_SEGMENT_RESUMING ||
           segment->state == TMS_SEGMENT_REPAIRING;
}

/* Under the saver's lock: whether the segment has no owner and its memory is whole. Then its backup may be read. In every
 * other state the backup may belong to a call, which writes to it without the lock; only its `kind` never changes. */
static inline bool tms_segment_is_settled(const tms_segment_t *segment) {
    return segment->state == TMS_SEGMENT_ACTIVE || segment->state == TMS_SEGMENT_PAUSED;
}

/* `bytes` rounded up to the device's granularity, or 0 if that would overflow. */
uint64_t tms_segment_round(uint64_t bytes, size_t granularity);

#endif
