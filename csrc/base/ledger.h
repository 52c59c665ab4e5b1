/* The ledger: device memory that is not managed, counted by the library of this process that allocated it.
 *
 * Owns a record for each allocation, each piece of physical memory (cuMemCreate) and each of its mappings, in an array with
 * a hash table over it, which both grow by malloc. What cannot be recorded for lack of memory is not counted, and the number
 * of such allocations is told. Counting never fails or changes what is counted.
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
    uint32_t free_records; /* the first of those in a list, or TMS_NO_RECORD */
    uint32_t *slots;       /* open addressing: a number in `records`, or TMS_NO_RECORD */
    size_t slot_count;     /* a power of two; at least half of the slots are free */
    size_t keyed;          /* records in `slots`, and those taken out that may come back */
    tms_ledger_holder_t *holders;
    size_t holder_count, holder_capacity;
    uint64_t uncounted; /* allocations so far */
} tms_ledger_t;

/* What a free has taken out of the ledger. */
typedef struct tms_ledger_taken {
    uint32_t first; /* in a list, or TMS_NO_RECORD */
} tms_ledger_taken_t;

#define TMS_NO_RECORD UINT32_MAX

void tms_ledger_init(tms_ledger_t *ledger);
void tms_ledger_release(tms_ledger_t *ledger);
/* Around a fork. */
void tms_ledger_before_fork(tms_ledger_t *ledger);
void tms_ledger_after_fork_in_parent(tms_ledger_t *ledger);
void tms_ledger_after_fork_in_child(tms_ledger_t *ledger);

/* `caller` is an address in the code that called. A record of the same address or handle is replaced: its free was not seen.
 */
void tms_ledger_add(tms_ledger_t *ledger, const void *caller, int device, uint64_t address, uint64_t bytes);
void tms_ledger_add_handle(tms_ledger_t *ledger, const void *caller, int device, uint64_t handle, uint64_t bytes);
/* One more release is needed. Nothing for a handle that is not known. */
void tms_ledger_retain_handle(tms_ledger_t *ledger, uint64_t handle);
void tms_ledger_map(tms_ledger_t *ledger, uint64_t address, uint64_t bytes, uint64_t handle);

/* Before the call that frees an allocation, releases a handle, or unmaps a range of whole mappings. */
tms_ledger_taken_t tms_ledger_take(tms_ledger_t *ledger, uint64_t address);
tms_ledger_taken_t tms_ledger_take_handle(tms_ledger_t *ledger, uint64_t handle);
tms_ledger_taken_t tms_ledger_take_mappings(tms_ledger_t *ledger, uint64_t address, uint64_t bytes);
/* After it. `gone`: it has succeeded. */
void tms_ledger_settle(tms_ledger_t *ledger, tms_ledger_taken_t taken, bool gone);
/* The device was reset: nothing is allocated there. */
void tms_ledger_clear_device(tms_ledger_t *ledger, int device);

/* tms_api_t.libraries: a row for each library and device with memory. */
size_t tms_ledger_rows(tms_ledger_t *ledger, tms_library_info_t *rows, size_t capacity);
uint64_t tms_ledger_uncounted(tms_ledger_t *ledger);

#endif
