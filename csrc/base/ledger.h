/* The ledger: device memory that is not managed, counted by the library of this process that allocated it.
 *
 * Owns a record for each allocation, each piece of physical memory (cuMemCreate) and each of its mappings, in an array with
 * a hash table over it, which both grow by malloc. Memory that cannot be recorded for lack of host memory is not counted;
 * tms_ledger_uncounted returns the number of these allocations. Counting never fails or changes what is counted.
 *
 * An allocation counts from its return until its free. Physical memory counts until it has been released as often as it was
 * made or retained *and* has no mapping left. Mappings of memory that was not made here (imports) count nothing.
 *
 * A record is taken out before the call that frees the memory, because another thread may get the same address at once, and
 * settled after it: so a call that fails changes nothing.
 *
 * Any thread. `lock` is a leaf, and is not held while the loader is asked who the caller is. A forked child, which has
 * nothing of its parent's device memory, begins with an empty ledger. */
#ifndef TMS_LEDGER_H
#define TMS_LEDGER_H

#include <pthread.h>
#include <stdbool.h>

#include "base/callers.h"
#include "include/tms.h"

typedef struct tms_ledger_record tms_ledger_record_t;
typedef struct tms_ledger_holder tms_ledger_holder_t;

typedef struct tms_ledger {
    pthread_mutex_t lock;
    tms_callers_t callers;
    tms_ledger_record_t *records;
    size_t record_count, record_capacity;
    uint32_t free_records; /* the head of a list of free records, or TMS_NO_RECORD */
    uint32_t *slots;       /* open addressing: a number in `records`, or TMS_NO_RECORD */
    size_t slot_count;     /* a power of two; at least half of the slots are free */
    size_t keyed;          /* number of records in `slots`, and of records taken out that may come back */
    tms_ledger_holder_t *holders;
    size_t holder_count, holder_capacity;
    uint64_t uncounted; /* number of allocations so far that could not be recorded */
} tms_ledger_t;

/* The records that a free has taken out of the ledger. */
typedef struct tms_ledger_taken {
    uint32_t first; /* the head of a list of records, or TMS_NO_RECORD */
} tms_ledger_taken_t;

#define TMS_NO_RECORD UINT32_MAX

void tms_ledger_init(tms_ledger_t *ledger);
void tms_ledger_release(tms_ledger_t *ledger);
/* Called around a fork. */
void tms_ledger_before_fork(tms_ledger_t *ledger);
void tms_ledger_after_fork_in_parent(tms_ledger_t *ledger);
void tms_ledger_after_fork_in_child(tms_ledger_t *ledger);

/* `caller` is an address in the code that called. A record of the same address or handle is replaced, because its free was
 * not seen.
 */
void tms_ledger_add(tms_ledger_t *ledger, const void *caller, int device, uint64_t address, uint64_t bytes);
void tms_ledger_add_handle(tms_ledger_t *ledger, const void *caller, int device, uint64_t handle, uint64_t bytes);
/* Records that one more release is needed. Does nothing if the handle is not known. */
void tms_ledger_retain_handle(tms_ledger_t *ledger, uint64_t handle);
void tms_ledger_map(tms_ledger_t *ledger, uint64_t address, uint64_t bytes, uint64_t handle);

/* Called before the call that frees an allocation, releases a handle, or unmaps a range of whole mappings. */
tms_ledger_taken_t tms_ledger_take(tms_ledger_t *ledger, uint64_t address);
tms_ledger_taken_t tms_ledger_take_handle(tms_ledger_t *ledger, uint64_t handle);
tms_ledger_taken_t tms_ledger_take_mappings(tms_ledger_t *ledger, uint64_t address, uint64_t bytes);
/* Called after that call. `gone` says whether the call has succeeded. */
void tms_ledger_settle(tms_ledger_t *ledger, tms_ledger_taken_t taken, bool gone);
/* Called when the device was reset, so that nothing is allocated there any more. */
void tms_ledger_clear_device(tms_ledger_t *ledger, int device);

/* tms_api_t.libraries: a row for each library and device with memory. */
size_t tms_ledger_rows(tms_ledger_t *ledger, tms_library_info_t *rows, size_t capacity);
uint64_t tms_ledger_uncounted(tms_ledger_t *ledger);

#endif
