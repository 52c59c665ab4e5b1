/* Maps addresses, interior ones included, to segments, and lists the segments in order of allocation.
 *
 * An intrusive search tree (a treap: a tree ordered by address and heap-ordered by a random priority) plus an intrusive
 * list, so inserting cannot fail and removing frees nothing. Owns no segment. Every call needs the saver's lock. */
#ifndef TMS_REGISTRY_H
#define TMS_REGISTRY_H

#include <stddef.h>
#include <stdint.h>

/* Embedded in each segment. `begin` and `end` are set by the owner before inserting and constant while inserted. */
typedef struct tms_registry_node {
    uint64_t begin, end; /* [begin, end), not empty, not overlapping another node */
    struct tms_registry_node *left, *right;
    struct tms_registry_node *previous, *next; /* in order of insertion */
    uint32_t priority;
} tms_registry_node_t;

typedef struct tms_registry {
    tms_registry_node_t *root;
    tms_registry_node_t *first, *last;
    size_t count;
    uint32_t random; /* state of the priority generator */
} tms_registry_t;

void tms_registry_init(tms_registry_t *registry);
void tms_registry_insert(tms_registry_t *registry, tms_registry_node_t *node);
void tms_registry_remove(tms_registry_t *registry, tms_registry_node_t *node);
/* The node that contains `address`, or NULL. */
tms_registry_node_t *tms_registry_find(const tms_registry_t *registry, uint64_t address);
/* The first node, by address, that has an address in [begin, end), or NULL. */
tms_registry_node_t *tms_registry_overlapping(const tms_registry_t *registry, uint64_t begin, uint64_t end);

#endif
