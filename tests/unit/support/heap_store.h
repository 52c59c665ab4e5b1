/* A store of backups for the tests: contents in plain memory of the heap. It can be told to fail in each of its operations.
 * The simulated GPU waits for a copy of pageable memory in the call that queues it: only with `pins` is one in flight.
 *
 * It shows what a store needs, and that the core knows no store: it is in no list but that of a fixture (support.h), under
 * a kind that the library does not have. */
#ifndef TMS_TESTS_HEAP_STORE_H
#define TMS_TESTS_HEAP_STORE_H

#include "backup/stores.h"

#define HEAP_BACKUP ((tms_backup_kind_t)(TMS_BACKUP_DISK + 1))

/* Where it can fail. commit, cancel, discard and destroy cannot; but what they let go may be refused, and waits in the
 * quarantine then. */
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
    bool pins;                           /* memory made from now on is pinned */
    _Atomic int fail_in[HEAP_FAILURES];  /* n: the n-th call from now on fails, and none after it; 0: none */
    _Atomic int blocks, batches, relays; /* that there are */
    _Atomic uint64_t helped, started;    /* calls */
} heap_store_t;

extern const tms_backup_operations_t heap_operations; /* of a heap_store_t */

/* For saver->stores. */
void heap_store_add(heap_store_t *heap, tms_backup_stores_t *stores);

#endif
