/* Guards registry.c by comparison with a sorted array. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/registry.h"

enum { SLOTS = 2000, OPERATIONS = 100000, SLOT_BYTES = 64, DEPTH_LIMIT = 64 };

/* The model: slot i covers addresses [i * SLOT_BYTES + low[i], i * SLOT_BYTES + high[i]) while present. The slots are in
 * order of address; `serial` gives the order of insertion. */
typedef struct model {
    tms_registry_node_t node[SLOTS];
    bool present[SLOTS];
    uint64_t serial[SLOTS];
    uint64_t serials;
    size_t count;
} model_t;

static uint32_t random_state;
static uint32_t random_below(uint32_t limit) {
    random_state = random_state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)random_state * limit) >> 32);
}

static tms_registry_node_t *model_find(model_t *model, uint64_t address) {
    size_t slot = (size_t)(address / SLOT_BYTES);
    if (slot >= SLOTS || !model->present[slot]) return NULL;
    tms_registry_node_t *node = &model->node[slot];
    return address >= node->begin && address < node->end ? node : NULL;
}

/* Order, heap property and count of a subtree; recursion is bounded by the depth that is asserted. */
static size_t check_subtree(const tms_registry_node_t *node, uint64_t low, uint64_t high, uint32_t priority, int depth) {
    if (!node) return 0;
    assert_true(depth < DEPTH_LIMIT);
    assert_true(node->begin >= low && node->end <= high && node->begin < node->end);
    assert_true(node->priority <= priority);
    return 1 + check_subtree(node->left, low, node->begin, node->priority, depth + 1) +
           check_subtree(node->right, node->end, high, node->priority, depth + 1);
}

static void check_everything(const tms_registry_t *registry, model_t *model) {
    size_t count = 0;
    uint64_t last_serial = 0;
    const tms_registry_node_t *previous = NULL;
    assert_int_equal(registry->count, model->count);
    assert_int_equal(check_subtree(registry->root, 0, UINT64_MAX, UINT32_MAX, 0), model->count);
    for (const tms_registry_node_t *node = registry->first; node; previous = node, node = node->next) {
        size_t slot = (size_t)(node - model->node);
        assert_true(slot < SLOTS && model->present[slot]);
        assert_true(model->serial[slot] > last_serial);
        assert_ptr_equal(node->previous, previous);
        last_serial = model->serial[slot];
        count++;
    }
    assert_ptr_equal(registry->last, previous);
    assert_int_equal(count, model->count);
}

static void test_random_operations(void **state) {
    (void)state;
    tms_registry_t registry;
    model_t *model = calloc(1, sizeof(*model));
    assert_non_null(model);
    tms_registry_init(&registry);
    random_state = 20260;
    for (int operation = 0; operation < OPERATIONS; operation++) {
        uint32_t slot = random_below(SLOTS);
        tms_registry_node_t *node = &model->node[slot];
        uint32_t choice = random_below(4);
        if (choice == 0 && !model->present[slot]) {
            uint32_t low = random_below(SLOT_BYTES / 2), bytes = 1 + random_below(SLOT_BYTES / 2);
            memset(node, 0x5A, sizeof(*node)); /* only the range of a node is expected to be set */
            node->begin = (uint64_t)slot * SLOT_BYTES + low;
            node->end = node->begin + bytes;
            tms_registry_insert(&registry, node);
            model->present[slot] = true;
            model->serial[slot] = ++model->serials;
            model->count++;
        } else if (choice == 1 && model->present[slot]) {
            tms_registry_remove(&registry, node);
            model->present[slot] = false;
            model->count--;
            assert_null(tms_registry_find(&registry, node->begin));
        } else {
            uint64_t address = random_below(SLOTS * SLOT_BYTES + SLOT_BYTES);
            assert_ptr_equal(tms_registry_find(&registry, address), model_find(model, address));
        }
        if (operation % 5000 == 0) check_everything(&registry, model);
    }
    assert_true(model->count > SLOTS / 4);
    check_everything(&registry, model);
    for (uint64_t address = 0; address < (uint64_t)SLOTS * SLOT_BYTES; address++) {
        assert_ptr_equal(tms_registry_find(&registry, address), model_find(model, address));
    }
    while (registry.first) tms_registry_remove(&registry, registry.first);
    assert_null(registry.root);
    assert_null(registry.last);
    assert_int_equal(registry.count, 0);
    free(model);
}

/* A driver returns rising addresses; the tree must not become a list. */
static void test_sorted_input_stays_shallow(void **state) {
    (void)state;
    enum { NODES = 20000 };
    tms_registry_t registry;
    tms_registry_node_t *nodes = calloc(NODES, sizeof(*nodes));
    assert_non_null(nodes);
    tms_registry_init(&registry);
    for (int i = 0; i < NODES; i++) {
        nodes[i].begin = (uint64_t)i << 21;
        nodes[i].end = (uint64_t)(i + 1) << 21;
        tms_registry_insert(&registry, &nodes[i]);
    }
    assert_int_equal(check_subtree(registry.root, 0, UINT64_MAX, UINT32_MAX, 0), NODES);
    for (int i = 0; i < NODES; i++) {
        assert_ptr_equal(tms_registry_find(&registry, nodes[i].begin), &nodes[i]);
        assert_ptr_equal(tms_registry_find(&registry, nodes[i].end - 1), &nodes[i]);
    }
    assert_null(tms_registry_find(&registry, nodes[NODES - 1].end));
    free(nodes);
}

static void test_edges(void **state) {
    (void)state;
    tms_registry_t registry;
    tms_registry_node_t node = {.begin = 100, .end = 101}, last = {.begin = UINT64_MAX - 1, .end = UINT64_MAX},
                        stranger = {.begin = 50, .end = 60};
    tms_registry_init(&registry);
    assert_null(tms_registry_find(&registry, 0));
    tms_registry_insert(&registry, &node);
    tms_registry_insert(&registry, &last);
    assert_null(tms_registry_find(&registry, 99));
    assert_ptr_equal(tms_registry_find(&registry, 100), &node);
    assert_null(tms_registry_find(&registry, 101));
    assert_ptr_equal(tms_registry_find(&registry, UINT64_MAX - 1), &last);
    assert_null(tms_registry_find(&registry, UINT64_MAX));
    tms_registry_remove(&registry, &stranger); /* was never inserted: nothing happens */
    assert_int_equal(registry.count, 2);
    tms_registry_remove(&registry, &node);
    assert_ptr_equal(registry.first, &last);
    assert_null(node.next);
    tms_registry_insert(&registry, &node); /* can be inserted again, and is then the last */
    assert_ptr_equal(registry.last, &node);
}

/* Every range against every node, by the definition. */
static void test_overlapping(void **state) {
    (void)state;
    enum { LAST = 40 };
    tms_registry_t registry;
    tms_registry_node_t nodes[] = {
        {.begin = 2, .end = 3}, {.begin = 10, .end = 20}, {.begin = 20, .end = 25}, {.begin = 30, .end = 32}};
    const size_t count = sizeof(nodes) / sizeof(nodes[0]);
    tms_registry_init(&registry);
    assert_null(tms_registry_overlapping(&registry, 0, UINT64_MAX));
    for (size_t i = 0; i < count; i++) tms_registry_insert(&registry, &nodes[i]);
    for (uint64_t begin = 0; begin < LAST; begin++) {
        for (uint64_t end = begin + 1; end <= LAST; end++) {
            const tms_registry_node_t *expected = NULL;
            for (size_t i = count; i-- > 0;) {
                if (nodes[i].begin < end && begin < nodes[i].end) expected = &nodes[i];
            }
            assert_ptr_equal(tms_registry_overlapping(&registry, begin, end), expected);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_operations),
        cmocka_unit_test(test_sorted_input_stays_shallow),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_overlapping),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
