/* A store of backups for the tests: contents in plain heap memory. Each of its operations can be made to fail. The
 * simulated GPU waits for a copy of pageable memory in the call that queues it: copies are in flight only with `pins`.
 *
 * It shows what a store needs, and that the core depends on no store: it is only in the list of a fixture (support.h),
 * under a kind that the library does not have. */
#ifndef TMS_TESTS_HEAP_STORE_H
#define TMS_TESTS_HEAP_STORE_H

#include "backup/stores.h"

#define HEAP_BACKUP ((tms_backup_kind_t)(TMS_BACKUP_SHARED + 1))

/* Where it can fail. commit, cancel, discard and destroy cannot; but the memory that they release may be refused, and is
 * then quarantined. */
typedef enum heap_failure {
    HEAP_BEGIN,
    HEAP_PLAN,
    HEAP_START,
    HEAP_SAVE,
    HEAP_SAVED, /* at the end of save: the copies are queued */
    HEAP_WAIT,
    HEAP_LOAD,
    HEAP_LOADED,
    HEAP_FIND,
    HEAP_GIVE_BACK,
    HEAP_FAILURES
} heap_failure_t;

typedef struct heap_store {
    tms_devices_t *devices;
    tms_quarantine_t *quarantine;
    bool pins;                           /* memory allocated from now on is pinned */
    _Atomic int fail_in[HEAP_FAILURES];  /* n: only the n-th call from now on fails; 0: none */
    _Atomic int blocks, batches, relays; /* that exist */
    _Atomic uint64_t helped, started;    /* calls */
} heap_store_t;

extern const tms_backup_operations_t heap_operations; /* of a heap_store_t */

/* For saver->stores. */
void heap_store_add(heap_store_t *heap, tms_backup_stores_t *stores);

#endif
