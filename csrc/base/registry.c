#include "base/registry.h"

#include "base/random.h"

/* Every walk is a loop over links (addresses of the pointers to nodes), so a degenerate tree costs time but no stack. The
 * expected depth is logarithmic. */

enum { RANDOM_SEED = 0x9E3779B9 & 0x7FFFFFFF }; /* any value but 0 */

void tms_registry_init(tms_registry_t *registry) { *registry = (tms_registry_t){.random = RANDOM_SEED}; }

/* Splits a tree into the nodes before and from `key` on. */
static void split(tms_registry_node_t *tree, uint64_t key, tms_registry_node_t **before, tms_registry_node_t **after) {
    while (tree) {
        if (tree->begin < key) {
            *before = tree;
            before = &tree->right;
            tree = tree->right;
        } else {
            *after = tree;
            after = &tree->left;
            tree = tree->left;
        }
    }
    *before = NULL;
    *after = NULL;
}

/* Joins two trees, all of whose nodes are ordered left before right, into *link. */
static void join(tms_registry_node_t **link, tms_registry_node_t *left, tms_registry_node_t *right) {
    while (left && right) {
        if (left->priority >= right->priority) {
            *link = left;
            link = &left->right;
            left = left->right;
        } else {
            *link = right;
            link = &right->left;
            right = right->left;
        }
    }
    *link = left ? left : right;
}

void tms_registry_insert(tms_registry_t *registry, tms_registry_node_t *node) {
    node->priority = tms_random_next(&registry->random);
    tms_registry_node_t **link = &registry->root;
    while (*link && (*link)->priority >= node->priority) {
        link = node->begin < (*link)->begin ? &(*link)->left : &(*link)->right;
    }
    split(*link, node->begin, &node->left, &node->right);
    *link = node;

    node->previous = registry->last;
    node->next = NULL;
    *(registry->last ? &registry->last->next : &registry->first) = node;
    registry->last = node;
    registry->count++;
}

void tms_registry_remove(tms_registry_t *registry, tms_registry_node_t *node) {
    tms_registry_node_t **link = &registry->root;
    while (*link && *link != node) link = node->begin < (*link)->begin ? &(*link)->left : &(*link)->right;
    if (!*link) return; /* not in this registry */
    join(link, node->left, node->right);

    *(node->previous ? &node->previous->next : &registry->first) = node->next;
    *(node->next ? &node->next->previous : &registry->last) = node->previous;
    node->left = node->right = node->previous = node->next = NULL;
    registry->count--;
}

tms_registry_node_t *tms_registry_find(const tms_registry_t *registry, uint64_t address) {
    tms_registry_node_t *node = registry->root;
    while (node && (address < node->begin || address >= node->end)) {
        node = address < node->begin ? node->left : node->right;
    }
    return node;
}

tms_registry_node_t *tms_registry_overlapping(const tms_registry_t *registry, uint64_t begin, uint64_t end) {
    tms_registry_node_t *node = registry->root, *first = NULL; /* the first that ends behind `begin` */
    while (node) {
        if (node->end > begin) first = node;
        node = node->end > begin ? node->left : node->right;
    }
    return first && first->begin < end ? first : NULL;
}
