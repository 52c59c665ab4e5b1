/* Memory that the program creates, maps, unmaps and releases itself, with the calls of the driver's virtual memory
 * management: the expandable segments of PyTorch's allocator (preload/handle_hooks.c).
 *
 * The program gets handles that are numbers of ours, which the driver never uses. A handle has physical memory from its
 * creation on. Mapped, it is a segment like any other, with a run of its own, except that its addresses are the program's.
 * A pause takes its physical memory away, and a resume gives it another; the program's handle stays the same. A handle is
 * mapped once, as a whole. When the program unmaps it, the physical memory is released at once.
 *
 * PyTorch maps and unmaps with its allocator's mutex held, and a pause asks PyTorch what is live, for which it takes that
 * mutex. So an unmap never waits for a call that owns the segment: the segment becomes an orphan (orphans.h). A map to the
 * addresses of an orphan takes its memory over if a pause owns it that has not begun to release memory. The pause then
 * leaves that memory as it is. The segment of the new handle, with the tag and the backup of its own region, is the orphan's
 * successor: it gets the memory, ACTIVE, when the pause ends. In the other cases (a resume is filling the memory, or a pause
 * is unmapping it) the map is `busy`, and the caller tries again without the GIL: these calls need nothing of PyTorch any
 * more.
 *
 * The program waits for its own work before it unmaps, as with the driver's function.
 *
 * Any thread, which may hold torch's allocator mutex and the GIL. Takes the saver's lock for the registries and counters.
 * In a forked child nothing is done, because the memory belongs to the parent. */
#ifndef TMS_HANDLES_H
#define TMS_HANDLES_H

#include "core/model/saver.h"

/* Whether a number is a handle of ours, and not one of the driver's. */
bool tms_handles_is_ours(uint64_t number);

/* Creates a handle with physical memory, and one reference. `bytes` is a multiple of the granularity, else
 * TMS_INVALID_ARGUMENT. The errors are those of an allocation. */
tms_status_t tms_handles_create(tms_saver_t *saver, const tms_region_t *region, uint64_t bytes, int device, uint64_t *number,
                                tms_error_t *error);
/* Maps all of a handle at addresses that the program has reserved, with access for every device that has access to other
 * memory. *busy: the memory of another handle is still there, and the caller may try again. The status is then
 * TMS_INVALID_STATE, or TMS_DRIVER if the driver has refused the addresses. After a failure the handle is not mapped. What a
 * failed map could not undo is undone by the next one, or by the release of the handle. */
tms_status_t tms_handles_map(tms_saver_t *saver, uint64_t address, uint64_t bytes, uint64_t number, bool *busy,
                             tms_error_t *error);
/* Ends a mapping, given as a whole, and releases its memory. TMS_NOT_MANAGED, with *error unfilled: no managed memory is
 * there. */
tms_status_t tms_handles_unmap(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_error_t *error);
/* Drops one reference. The memory of a handle that is not mapped is released with the last one. */
tms_status_t tms_handles_release(tms_saver_t *saver, uint64_t number, tms_error_t *error);
/* Returns the handle that is mapped at the address, with another reference. Returns false if there is none. */
bool tms_handles_retain(tms_saver_t *saver, uint64_t address, uint64_t *number);
/* The driver's handle of the memory that a handle has now. It is valid until the next pause. TMS_INVALID_STATE while it has
 * none. */
tms_status_t tms_handles_memory(tms_saver_t *saver, uint64_t number, CUmemGenericAllocationHandle *memory,
                                tms_error_t *error);
/* Under the lock, by the call that owned an orphan, once the orphan is in no registry: publishes its successor, if it has
 * one, with its memory. */
void tms_handles_hand_over(tms_saver_t *saver, tms_segment_t *orphan);
/* Finds the first mapping with an address in [*begin, *end), and sets these to its part of the range. Returns false if there
 * is none. */
bool tms_handles_find(tms_saver_t *saver, uint64_t *begin, uint64_t *end);

#endif
