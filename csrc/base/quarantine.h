/* Resources that the driver or the system failed to release. They are kept, counted, and retried by later calls.
 *
 * Each such resource embeds a node, so that adding it never needs memory. An owner that fails to release its resource fills
 * `retry` and `holds` and adds the node. From then on the quarantine owns the resource; `retry` tries to release it again
 * and frees it when nothing is left.
 *
 * Any thread. `lock` is a leaf and is not held during a retry: the retrying thread takes the node off the list first. */
#ifndef TMS_QUARANTINE_H
#define TMS_QUARANTINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

/* The kinds of resources, counted separately. */
typedef enum tms_quarantine_kind {
    TMS_QUARANTINE_HANDLE, /* physical device memory */
    TMS_QUARANTINE_RANGE,  /* an address range of the device */
    TMS_QUARANTINE_HOST,   /* host memory, pinned or mapped */
    TMS_QUARANTINE_OTHER,  /* streams, events, contexts, files */
    TMS_QUARANTINE_KINDS
} tms_quarantine_kind_t;

typedef uint32_t tms_quarantine_mask_t;
#define TMS_QUARANTINE_BIT(kind) ((tms_quarantine_mask_t)1 << TMS_QUARANTINE_##kind)

/* Embedded in the resource. Owned by the quarantine from tms_quarantine_add on. */
typedef struct tms_quarantined {
    struct tms_quarantined *next;
    /* Retries the release, with no lock held, and returns what is still held. 0: everything was released, and the resource
     * has been freed. */
    tms_quarantine_mask_t (*retry)(struct tms_quarantined *node);
    void *context;               /* for `retry` */
    tms_quarantine_mask_t holds; /* not 0: TMS_QUARANTINE_BIT(HANDLE) | ... */
} tms_quarantined_t;

typedef struct tms_quarantine {
    pthread_mutex_t lock;
    tms_quarantined_t *first;
    _Atomic uint64_t held[TMS_QUARANTINE_KINDS]; /* including nodes that are being retried */
    _Atomic uint64_t nodes;
} tms_quarantine_t;

tms_status_t tms_quarantine_init(tms_quarantine_t *quarantine, tms_error_t *error);
/* Retries everything once, then forgets the rest. */
void tms_quarantine_release(tms_quarantine_t *quarantine);
/* In a forked child, with `lock` held by the forking thread: forgets everything, which belongs to the parent. */
void tms_quarantine_after_fork_in_child(tms_quarantine_t *quarantine);

void tms_quarantine_add(tms_quarantine_t *quarantine, tms_quarantined_t *node);
/* Retries everything once. Cheap when the quarantine is empty. */
void tms_quarantine_retry(tms_quarantine_t *quarantine);
/* Retries only the nodes that hold host memory (`host`), or only the others. Unpinning host memory waits for the device. */
void tms_quarantine_retry_part(tms_quarantine_t *quarantine, bool host);

static inline uint64_t tms_quarantine_held(const tms_quarantine_t *quarantine, tms_quarantine_kind_t kind) {
    return atomic_load(&quarantine->held[kind]);
}
static inline int tms_quarantine_is_empty(const tms_quarantine_t *quarantine) {
    return atomic_load(&quarantine->nodes) == 0;
}

#endif
