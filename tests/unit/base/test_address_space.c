/* Guards address_space.c: spans do not overlap, lie side by side, become one again, and are found in constant time; backed
 * spans are apart from bare ones, and nobody gets a held one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/address_space.h"

#define MIB     ((uint64_t)1 << 20)
#define GRANULE (2 * MIB)
enum { PIECES = 500, OPERATIONS = 50000, MAX_COMPARED = 16 };
/* A listed span can be taken at once. */
enum { UNLISTED = false, LISTED = true };

static uint32_t random_state;
static uint32_t random_below(uint32_t limit) {
    random_state = random_state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)random_state * limit) >> 32);
}

/* Stands in for the driver: never the same addresses twice. */
static uint64_t reserve(uint64_t bytes) {
    static uint64_t next = (uint64_t)1 << 40;
    uint64_t begin = next;
    next += bytes + GRANULE;
    return begin;
}

static void add(tms_space_t *space, uint64_t bytes) {
    tms_range_t *range = calloc(1, sizeof *range);
    assert_non_null(range);
    range->node.begin = reserve(bytes);
    range->node.end = range->node.begin + bytes;
    assert_true(tms_space_add(space, range));
}

static tms_span_t *take(tms_space_t *space, uint64_t bytes) {
    if (!tms_space_has_room(space, bytes)) add(space, tms_space_growth(space, bytes));
    tms_span_t *span = tms_space_take(space, bytes, space);
    assert_non_null(span);
    assert_int_equal(tms_span_bytes(span), bytes);
    return span;
}

static void remove_if_bare(tms_range_t *range) {
    if (!tms_range_is_bare(range)) return;
    tms_space_remove(range);
    free(range);
}

static void give_back(tms_span_t *span) {
    tms_range_t *range = span->range;
    tms_space_give_back(span, NULL, LISTED);
    remove_if_bare(range);
}

/* The spans of a range: without gaps, no two listed ones with the same backing side by side. Returns the bytes in use. */
static uint64_t check_range(const tms_range_t *range) {
    uint64_t at = range->node.begin, used = 0;
    const tms_span_t *before = NULL;
    for (const tms_span_t *span = range->first; span; before = span, span = span->after) {
        assert_int_equal(span->begin, at);
        assert_true(span->end > span->begin);
        assert_ptr_equal(span->before, before);
        assert_ptr_equal(span->range, range);
        assert_false(span->owner && span->listed);
        assert_false(before && before->listed && span->listed && before->backing == span->backing);
        if (span->owner) used += tms_span_bytes(span);
        at = span->end;
    }
    assert_int_equal(at, range->node.end);
    return used;
}

static void spans_lie_side_by_side(void **state) {
    (void)state;
    tms_space_t space = {.reserved_bytes = 0};
    tms_span_t *spans[64];
    for (int i = 0; i < 64; i++) spans[i] = take(&space, 16 * MIB);
    int neighbours = 0;
    for (int i = 1; i < 64; i++) neighbours += spans[i]->begin == spans[i - 1]->end;
    assert_int_equal(neighbours, 63 - 6); /* ranges of 1, 1, 2, 4, 8, 16 and 32 spans */
    assert_int_equal(space.reserved_bytes, 64 * 16 * MIB);
    for (int i = 0; i < 64; i++) give_back(spans[i]);
    assert_int_equal(space.reserved_bytes, 0);
}

static void growth_is_bounded(void **state) {
    (void)state;
    tms_space_t space = {.reserved_bytes = 0};
    assert_int_equal(tms_space_growth(&space, GRANULE), GRANULE);
    space.reserved_bytes = 8 * MIB;
    assert_int_equal(tms_space_growth(&space, GRANULE), 8 * MIB);
    assert_int_equal(tms_space_growth(&space, 16 * MIB), 16 * MIB);
    assert_int_equal(tms_space_growth(&space, TMS_SPACE_ALONE_BYTES), TMS_SPACE_ALONE_BYTES);
    space.reserved_bytes = 4 * TMS_MAX_SPACE_RANGE_BYTES;
    assert_int_equal(tms_space_growth(&space, GRANULE), TMS_MAX_SPACE_RANGE_BYTES);
    assert_int_equal(tms_space_growth(&space, 2 * TMS_SPACE_ALONE_BYTES), 2 * TMS_SPACE_ALONE_BYTES);
}

static void a_hole_is_used_again(void **state) {
    (void)state;
    tms_space_t space = {.reserved_bytes = 0};
    add(&space, 64 * MIB);
    tms_span_t *first = take(&space, 8 * MIB), *second = take(&space, 4 * MIB), *third = take(&space, 2 * MIB);
    const uint64_t hole = second->begin;
    give_back(second);
    second = take(&space, 4 * MIB);
    assert_int_equal(second->begin, hole);
    give_back(first);
    give_back(second);
    first = take(&space, 12 * MIB); /* both holes became one */
    assert_int_equal(first->end, third->begin);
    give_back(first);
    give_back(third);
    assert_int_equal(space.reserved_bytes, 0);
}

/* Both holes have the number of bits of what is wanted. */
static void the_smallest_hole_that_fits_is_taken(void **state) {
    (void)state;
    tms_space_t space = {.reserved_bytes = 0};
    const uint64_t sizes[] = {12 * MIB, 2 * MIB, 8 * MIB, 2 * MIB, 40 * MIB};
    tms_span_t *spans[5];
    add(&space, 64 * MIB);
    for (int i = 0; i < 5; i++) spans[i] = take(&space, sizes[i]);
    for (int small_first = 0; small_first < 2; small_first++) {
        const uint64_t smaller = spans[2]->begin;
        give_back(spans[small_first ? 2 : 0]);
        give_back(spans[small_first ? 0 : 2]);
        spans[2] = take(&space, 8 * MIB);
        assert_int_equal(spans[2]->begin, smaller);
        spans[0] = take(&space, 12 * MIB);
    }
    for (int i = 0; i < 5; i++) give_back(spans[i]);
    assert_int_equal(space.reserved_bytes, 0);
}

static void random_operations(void **state) {
    (void)state;
    random_state = 27;
    tms_space_t space = {.reserved_bytes = 0};
    tms_span_t *spans[PIECES] = {NULL};
    uint64_t most = 0, used = 0;
    for (int i = 0; i < OPERATIONS; i++) {
        uint32_t slot = random_below(PIECES);
        const uint64_t steps = space.steps;
        if (spans[slot]) {
            used -= tms_span_bytes(spans[slot]);
            give_back(spans[slot]);
            spans[slot] = NULL;
        } else {
            spans[slot] = take(&space, GRANULE * (1 + random_below(random_below(4) ? 10 : 200)));
            used += tms_span_bytes(spans[slot]);
            (void)check_range(spans[slot]->range);
        }
        if (used > most) most = used;
        assert_true(space.steps - steps <= 3 * MAX_COMPARED); /* two looks for room, and a take */
    }
    for (uint32_t i = 0; i < PIECES; i++) {
        if (spans[i]) give_back(spans[i]);
    }
    assert_int_equal(space.reserved_bytes, 0);
    assert_true(most > 0);
}

static void backed_spans_are_apart(void **state) {
    (void)state;
    int memory, other;
    tms_space_t space = {.reserved_bytes = 0};
    tms_span_t *spans[6];
    add(&space, 12 * MIB);
    for (int i = 0; i < 6; i++) spans[i] = take(&space, 2 * MIB);
    tms_range_t *range = spans[0]->range;
    tms_space_give_back(spans[0], &memory, LISTED);
    tms_space_give_back(spans[2], NULL, LISTED);
    tms_space_give_back(spans[1], &memory, LISTED); /* one with the first, not with the third */
    tms_space_give_back(spans[3], &other, LISTED);
    assert_int_equal(space.backed_bytes, 6 * MIB);
    assert_int_equal(check_range(range), 4 * MIB);
    assert_null(tms_space_take_backed(&space, 6 * MIB, &space));
    assert_false(tms_space_has_room(&space, 4 * MIB));
    tms_span_t *taken = tms_space_take_backed(&space, 4 * MIB, &space);
    assert_int_equal(taken->begin, range->node.begin);
    assert_ptr_equal(taken->backing, &memory);
    taken->backing = NULL;
    assert_int_equal(space.backed_bytes, 2 * MIB);
    give_back(taken);
    give_back(spans[4]);
    give_back(spans[5]);
    assert_false(tms_range_is_bare(range)); /* `other` is mapped there */
    tms_space_hold(spans[3], spans[3]->end);
    tms_space_unback(spans[3], spans[3]->end);
    assert_false(tms_range_is_bare(range)); /* held */
    tms_space_settle(spans[3], spans[3]->end);
    assert_int_equal(space.backed_bytes, 0);
    remove_if_bare(range);
    assert_int_equal(space.reserved_bytes, 0);
}

static void nobody_gets_a_held_span(void **state) {
    (void)state;
    int memory;
    tms_space_t space = {.reserved_bytes = 0};
    add(&space, 8 * MIB);
    tms_span_t *first = take(&space, 2 * MIB), *second = take(&space, 2 * MIB), *third = take(&space, 4 * MIB);
    tms_range_t *range = first->range;
    tms_space_give_back(first, &memory, LISTED);
    tms_space_hold(first, third->end);
    assert_null(tms_space_take_backed(&space, 2 * MIB, &space));
    tms_space_give_back(second, &memory, UNLISTED); /* freed meanwhile */
    assert_null(tms_space_take_backed(&space, 2 * MIB, &space));
    assert_int_equal(space.backed_bytes, 4 * MIB);
    tms_space_settle(first, third->end);
    assert_int_equal(check_range(range), 4 * MIB);
    tms_span_t *again = tms_space_take_backed(&space, 4 * MIB, &space); /* both are one */
    assert_int_equal(again->begin, range->node.begin);
    again->backing = NULL;
    give_back(again);
    give_back(third);
    assert_int_equal(space.reserved_bytes, 0);
}

static void many_spaces_of_one_span(void **state) {
    (void)state;
    enum { SPACES = 50000 };
    uint64_t reserved = 0;
    for (int i = 0; i < SPACES; i++) {
        tms_space_t space = {.reserved_bytes = 0};
        tms_span_t *span = take(&space, GRANULE);
        reserved += space.reserved_bytes;
        give_back(span);
    }
    assert_int_equal(reserved, SPACES * GRANULE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spans_lie_side_by_side), cmocka_unit_test(growth_is_bounded),
        cmocka_unit_test(a_hole_is_used_again),   cmocka_unit_test(the_smallest_hole_that_fits_is_taken),
        cmocka_unit_test(random_operations),      cmocka_unit_test(many_spaces_of_one_span),
        cmocka_unit_test(backed_spans_are_apart), cmocka_unit_test(nobody_gets_a_held_span),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
