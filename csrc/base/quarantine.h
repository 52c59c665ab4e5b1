/* What the driver or the system refused to take back: kept, counted, and tried again by later calls.
 *
 * Each thing that might be refused has a node embedded in it, so that adding one never needs memory. The owner that
 * could not give a thing back fills `retry` and `holds` and adds the node. From then on the thing belongs to the quarantine;
 * `retry` tries again and frees the thing when nothing is left of it.
 *
 * Any thread. `lock` is a leaf and is not held during a retry: a node is off the list while it is tried, by one thread. */
#ifndef TMS_QUARANTINE_H
#define TMS_QUARANTINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

/* What is held; each is counted by itself. */
typedef enum tms_quarantine_kind {
    TMS_QUARANTINE_HANDLE, /* physical device memory */
    TMS_QUARANTINE_RANGE,  /* an address range of the device */
    TMS_QUARANTINE_HOST,   /* host memory, pinned or mapped */
    TMS_QUARANTINE_OTHER,  /* streams, events, contexts, files */
    TMS_QUARANTINE_KINDS
} tms_quarantine_kind_t;

typedef uint32_t tms_quarantine_mask_t;
#define TMS_QUARANTINE_BIT(kind) ((tms_quarantine_mask_t)1 << TMS_QUARANTINE_##kind)

/* Embedded in the thing, and the quarantine's from tms_quarantine_add on. */
typedef struct tms_quarantined {
    struct tms_quarantined *next;
    /* Tries again, without any lock held, and returns what is still refused. 0: nothing, and the thing has been freed. */
    tms_quarantine_mask_t (*retry)(struct tms_quarantined *node);
    void *context;               /* for `retry` */
    tms_quarantine_mask_t holds; /* not 0: TMS_QUARANTINE_BIT(HANDLE) | ... */
} tms_quarantined_t;

typedef struct tms_quarantine {
    pthread_mutex_t lock;
    tms_quarantined_t *first;
    _Atomic uint64_t held[TMS_QUARANTINE_KINDS]; /* also of nodes that are being tried again at the moment */
    _Atomic uint64_t nodes;
} tms_quarantine_t;

tms_status_t tms_quarantine_init(tms_quarantine_t *quarantine, tms_error_t *error);
/* Tries everything once more, then forgets what is left. */
void tms_quarantine_release(tms_quarantine_t *quarantine);
/* In a forked child, with `lock` held by the forking thread: forgets everything, which is the parent's. */
void tms_quarantine_after_fork_in_child(tms_quarantine_t *quarantine);

void tms_quarantine_add(tms_quarantine_t *quarantine, tms_quarantined_t *node);
/* Tries everything again, once. Cheap when there is nothing. */
void tms_quarantine_retry(tms_quarantine_t *quarantine);
/* The same with what holds host memory only (`host`), which waits for the device where it is pinned, or with the rest.
 */
void tms_quarantine_retry_part(tms_quarantine_t *quarantine, bool host);

static inline uint64_t tms_quarantine_held(const tms_quarantine_t *quarantine, tms_quarantine_kind_t kind) {
    return atomic_load(&quarantine->held[kind]);
}
static inline int tms_quarantine_is_empty(const tms_quarantine_t *quarantine) {
    return atomic_load(&quarantine->nodes) == 0;
}

#endif
