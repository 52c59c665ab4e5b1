/* Guard mode, for debugging: while an allocation is paused, its addresses are mapped read-only to one guard page of
 * TMS_GUARD_BYTE, over and over. A late read finds that byte, a late copy into it fails, and a late write by a kernel
 * faults.
 *
 * A guard page is one piece of physical memory of the device's granularity, in a segment of its own that no registry has. It
 * exists while a segment of its device is guarded. This module counts the references to the guard pages, and maps them;
 * transition/guard_mode.h makes them and allocation/free.h releases them. Part of the saver. Any thread, under the saver's
 * lock, except for `on` and the two functions that make driver calls. */
#ifndef TMS_GUARD_H
#define TMS_GUARD_H

#include <stdatomic.h>

#include "core/model/run.h"

typedef struct tms_guard {
    _Atomic bool on; /* read once by each pause and resume */
    struct {
        tms_segment_t *page; /* NULL: none */
        uint64_t references; /* one for each guarded segment, and one for a call that makes more of them */
    } by_device[TMS_MAX_DEVICES];
} tms_guard_t;

/* Takes a reference to a device's guard page. Returns NULL if there is none. */
tms_segment_t *tms_guard_hold(tms_guard_t *guard, int device);
/* Installs the guard page of a device that has none, with one reference. */
void tms_guard_install(tms_guard_t *guard, tms_segment_t *page);
/* Drops a reference. If it was the last one, takes the guard page from the device and returns it; otherwise returns NULL. */
tms_segment_t *tms_guard_drop(tms_guard_t *guard, int device);

/* Maps the guard page, a handle of `page_bytes`, over the whole range, and lets `devices` read it. The owner of the segment
 * calls this without the lock. The segment must have no memory and no guard. On failure it is unchanged; if undoing failed
 * too, `guarded` shows what is left. */
tms_status_t tms_guard_map(tms_segment_t *segment, CUmemGenericAllocationHandle page, uint64_t page_bytes,
                           tms_device_mask_t devices, const tms_driver_table_t *driver, const tms_error_context_t *context,
                           tms_error_t *error);
/* Unmaps the guard page, if it is mapped. TMS_INVALID_STATE, with nothing changed, if a device that may read it is not
 * quiesced. */
tms_status_t tms_guard_unmap(tms_segment_t *segment, tms_quiesced_t quiesced, const tms_driver_table_t *driver,
                             const tms_error_context_t *context, tms_error_t *error);

#endif
