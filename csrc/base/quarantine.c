#include "base/quarantine.h"

#include <errno.h>

tms_status_t tms_quarantine_init(tms_quarantine_t *quarantine, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *quarantine = (tms_quarantine_t){.first = NULL};
    int os_error = pthread_mutex_init(&quarantine->lock, NULL);
    /* The only possible cause is a lack of memory. */
    return os_error == 0 ? TMS_OK : tms_error_set_os(error, &context, "pthread_mutex_init", ENOMEM, NULL);
}

void tms_quarantine_release(tms_quarantine_t *quarantine) {
    tms_quarantine_retry(quarantine);
    pthread_mutex_destroy(&quarantine->lock);
}

static void forget_all(tms_quarantine_t *quarantine) {
    quarantine->first = NULL;
    for (int kind = 0; kind < TMS_QUARANTINE_KINDS; kind++) atomic_store(&quarantine->held[kind], 0);
    atomic_store(&quarantine->nodes, 0);
}

void tms_quarantine_after_fork_in_child(tms_quarantine_t *quarantine) {
    (void)pthread_mutex_init(&quarantine->lock, NULL); /* cannot fail: it succeeded on this memory before */
    forget_all(quarantine);
}

/* Counts what a node holds now instead of what it held before. */
static void recount(tms_quarantine_t *quarantine, tms_quarantine_mask_t before, tms_quarantine_mask_t now) {
    for (int kind = 0; kind < TMS_QUARANTINE_KINDS; kind++) {
        unsigned was = before >> kind & 1, is = now >> kind & 1;
        if (is > was) atomic_fetch_add(&quarantine->held[kind], 1);
        if (is < was) atomic_fetch_sub(&quarantine->held[kind], 1);
    }
}

static void put(tms_quarantine_t *quarantine, tms_quarantined_t *node) {
    pthread_mutex_lock(&quarantine->lock);
    node->next = quarantine->first;
    quarantine->first = node;
    pthread_mutex_unlock(&quarantine->lock);
}

void tms_quarantine_add(tms_quarantine_t *quarantine, tms_quarantined_t *node) {
    recount(quarantine, 0, node->holds);
    atomic_fetch_add(&quarantine->nodes, 1);
    put(quarantine, node);
}

/* Moves nodes from the list to this thread: nodes that hold one of `kinds` (`with`), or nodes that hold none of them. */
static tms_quarantined_t *take(tms_quarantine_t *quarantine, tms_quarantine_mask_t kinds, bool with) {
    tms_quarantined_t *taken = NULL;
    if (tms_quarantine_is_empty(quarantine)) return NULL;
    pthread_mutex_lock(&quarantine->lock);
    for (tms_quarantined_t **place = &quarantine->first, *node; (node = *place);) {
        if (((node->holds & kinds) != 0) != with) {
            place = &node->next;
            continue;
        }
        *place = node->next;
        node->next = taken;
        taken = node;
    }
    pthread_mutex_unlock(&quarantine->lock);
    return taken;
}

static void try_all(tms_quarantine_t *quarantine, tms_quarantined_t *node) {
    while (node) {
        tms_quarantined_t *next = node->next;
        tms_quarantine_mask_t before = node->holds, now = node->retry(node);
        recount(quarantine, before, now);
        if (now) {
            node->holds = now;
            put(quarantine, node);
        } else {
            atomic_fetch_sub(&quarantine->nodes, 1);
        }
        node = next;
    }
}

void tms_quarantine_retry(tms_quarantine_t *quarantine) { try_all(quarantine, take(quarantine, 0, false)); }

void tms_quarantine_retry_part(tms_quarantine_t *quarantine, bool host) {
    try_all(quarantine, take(quarantine, TMS_QUARANTINE_BIT(HOST), host));
}
