/* One managed allocation: an address range, and the physical memory that may be mapped into it.
 *
 * These functions make the driver calls of a segment. Each does one step, undoes it on failure, and changes only its
 * segment, so that they need no lock. They may be called by the thread that created the segment and has not published it
 * yet, or by the one that owns it in a transition (saver.h). States change under the saver's lock.
 */
#ifndef TMS_SEGMENT_H
#define TMS_SEGMENT_H

#include "backup/backup.h"
#include "base/address_space.h"
#include "base/descriptors.h"
#include "base/quarantine.h"
#include "base/registry.h"
#include "base/shared_page.h"
#include "core/quiesced.h"
#include "core/region.h"
#include "device/device.h"

/* What was last told of a segment (footprint.h). */
typedef struct tms_told {
    tms_footprint_t holds;
    uint64_t disk_backup_bytes; /* part of its backup */
    bool damaged;
    tms_shared_row_t row; /* of the shared page */
} tms_told_t;

typedef struct tms_segment {
    tms_registry_node_t node;      /* first: [address, address + reserved size) */
    tms_quarantined_t quarantined; /* used once it has been freed */
    tms_quiesced_t quiesced;       /* likewise: for the next attempt to unmap it */
    tms_piece_t *piece;            /* its addresses (allocation/ranges.h) */
    uint64_t bytes;                /* requested size */
    int device;
    tms_segment_state_t state;
    bool mapped;             /* `handle` is mapped and accessible */
    bool has_handle;         /* `handle` must be released */
    bool free_requested;     /* freed while a call owned it: that call finishes the free */
    bool exclusive;          /* holds one count of its device's lock (device_lock.h) */
    bool only_preserved;     /* the last pause has kept preserved blocks only */
    tms_contents_t contents; /* for callers; nothing here depends on it */
    CUmemGenericAllocationHandle handle;
    tms_descriptor_t exported;    /* of `handle`, once it has been exported (export.h); closed when the memory goes */
    uint64_t generation;          /* of that export: its number in the process */
    uint64_t guarded;             /* bytes from the start of the range at which a guard page is mapped (guard.h) */
    tms_device_mask_t accessible; /* devices that have access to the memory or the guard page, owner included */
    tms_tag_t *tag;
    tms_backup_t backup;
    double allocated_at, changed_at; /* on tms_wait_now's clock: when it was made, and when its state last changed */
    tms_told_t told;                 /* footprint.h; under the saver's lock */
    /* DAMAGED: the driver call that failed in the last repair, and its result; "" if unknown. */
    char refused_call[TMS_ERROR_NAME_BYTES];
    int refused_result;
    struct tms_segment *next_in_transition; /* in the list of the call that owns it, or of deferred frees */
} tms_segment_t;

static inline CUdeviceptr tms_segment_address(const tms_segment_t *segment) { return segment->node.begin; }
static inline uint64_t tms_segment_reserved(const tms_segment_t *segment) { return segment->node.end - segment->node.begin; }
static inline tms_segment_t *tms_segment_of(tms_registry_node_t *node) { return (tms_segment_t *)node; }

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

/* Creates physical memory. The segment must have none. */
tms_status_t tms_segment_create(tms_segment_t *segment, const tms_driver_table_t *driver, const tms_device_table_t *devices,
                                const tms_error_context_t *context, tms_error_t *error);
/* Maps the memory that was created at the range and grants the owner and `peers` access. On failure the memory is released;
 * if undoing failed too, `has_handle` and `mapped` show what is left. */
tms_status_t tms_segment_map(tms_segment_t *segment, const tms_driver_table_t *driver, tms_device_mask_t peers,
                             const tms_error_context_t *context, tms_error_t *error);
/* Both. The segment must have no memory. On failure the segment is unchanged; if undoing failed too, `has_handle` and
 * `mapped` show what is left. */
tms_status_t tms_segment_populate(tms_segment_t *segment, const tms_driver_table_t *driver,
                                  const tms_device_table_t *devices, tms_device_mask_t peers,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Closes the descriptor, unmaps and releases the memory. After a failure `mapped` and `has_handle` show what is left.
 * TMS_INVALID_STATE, with nothing changed, if a device with access is not quiesced. */
tms_status_t tms_segment_depopulate(tms_segment_t *segment, tms_quiesced_t quiesced, const tms_driver_table_t *driver,
                                    const tms_error_context_t *context, tms_error_t *error);
/* Maps the page, a handle of `page_bytes`, over the whole range, and lets `devices` read it. The segment must have no memory
 * and no guard. On failure it is unchanged; if undoing failed too, `guarded` shows what is left. */
tms_status_t tms_segment_guard(tms_segment_t *segment, CUmemGenericAllocationHandle page, uint64_t page_bytes,
                               tms_device_mask_t devices, const tms_driver_table_t *driver,
                               const tms_error_context_t *context, tms_error_t *error);
/* Unmaps the guard page, if it is mapped. TMS_INVALID_STATE, with nothing changed, if a device that may read it is not
 * quiesced. */
tms_status_t tms_segment_unguard(tms_segment_t *segment, tms_quiesced_t quiesced, const tms_driver_table_t *driver,
                                 const tms_error_context_t *context, tms_error_t *error);
/* Grants access to devices of `peers` that lack it. */
tms_status_t tms_segment_share(tms_segment_t *segment, const tms_driver_table_t *driver, tms_device_mask_t peers,
                               const tms_error_context_t *context, tms_error_t *error);

#endif
