/* Guards account.c and the copy of the events: what the events say is held is what is held, also once the ring has wrapped.
 */
#include "core/model/inspect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/model/account.h"
#include "support.h"
#include "support/random_calls.h"

enum { ROOM = 64, LEVELS = 256, STEPS = 600, GATE = 1 };

/* What is held, by tag and device. */
typedef struct held {
    tms_footprint_t of[TAGS][DEVICES];
} held_t;

static size_t index_of(const char *tag) {
    size_t i = 0;
    while (strcmp(tags[i], tag) != 0) i++;
    return i;
}

static void add(held_t *held, const char *tag, int device, tms_footprint_t what, uint64_t sign) {
    tms_footprint_t *of = &held->of[index_of(tag)][device];
    of->resident_bytes += sign * what.resident_bytes;
    of->paused_bytes += sign * what.paused_bytes;
    of->backup_bytes += sign * what.backup_bytes;
}

static tms_event_t events[ROOM];
static tms_event_level_t levels[LEVELS];

static tms_events_copy_t copy_all(fixture_t *f) {
    tms_events_copy_t copy = {.events = events, .event_room = ROOM, .levels = levels, .level_room = LEVELS};
    tms_inspect_copy_events(&f->saver, &copy);
    assert_true(copy.level_count <= LEVELS);
    return copy;
}

static held_t held_after(const tms_events_copy_t *copy) {
    held_t held = {0};
    for (size_t i = 0; i < copy->level_count; i++) add(&held, levels[i].tag, levels[i].device, levels[i].holds, 1);
    return held;
}

/* What was held before the first event of the copy. */
static held_t held_before(const tms_events_copy_t *copy) {
    held_t held = held_after(copy);
    for (size_t i = 0; i < copy->event_count; i++) {
        if (events[i].tag) add(&held, events[i].tag, events[i].device, events[i].change, (uint64_t)-1);
    }
    return held;
}

/* The same from the saver's own rows. */
static held_t held_now(fixture_t *f) {
    static tms_segment_info_t rows[SEGMENTS + 1];
    held_t held = {0};
    size_t count = tms_inspect_segments(&f->saver, rows, SEGMENTS + 1);
    for (size_t i = 0; i < count; i++) {
        bool active = rows[i].state == TMS_SEGMENT_ACTIVE;
        add(&held, rows[i].tag, rows[i].device,
            (tms_footprint_t){.resident_bytes = active ? rows[i].reserved_bytes : 0,
                              .paused_bytes = active ? 0 : rows[i].reserved_bytes,
                              .backup_bytes = rows[i].backup_bytes},
            1);
    }
    return held;
}

static void use_ring(fixture_t *f, size_t capacity) {
    tms_error_t error;
    tms_events_release(&f->saver.events);
    ASSERT_OK(tms_events_init(&f->saver.events, capacity, &error), error);
}

static void totals_are_true_after_a_wrap(void **state) {
    fixture_t *f = *state;
    static held_t at[STEPS * ROOM]; /* by number of the next event */
    static bool known[STEPS * ROOM];
    uint64_t addresses[SEGMENTS] = {0}, compared = 0;
    uint32_t random = 20260727;
    enum { CAPACITY = 13 };
    use_ring(f, CAPACITY);
    for (int step = 0; step < STEPS; step++) {
        act(f, &random, addresses);
        tms_events_copy_t copy = copy_all(f);
        held_t now = held_now(f), after = held_after(&copy), before = held_before(&copy);
        assert_memory_equal(&after, &now, sizeof now);
        assert_true(copy.event_count <= CAPACITY);
        assert_int_equal(copy.capacity, CAPACITY);
        at[copy.recorded] = now;
        known[copy.recorded] = true;
        uint64_t first = copy.recorded - copy.event_count;
        if (!known[first]) continue;
        compared++;
        assert_memory_equal(&before, &at[first], sizeof before);
    }
    assert_true(compared > STEPS / 20);
}

/* ---- failures ---- */

static void damage_is_told(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    use_ring(f, ROOM);
    (void)allocate(f, "weights", TMS_BACKUP_PINNED, 2 * MIB);
    (void)allocate(f, "kv_cache", TMS_BACKUP_NONE, 4 * MIB);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    tms_events_copy_t copy = copy_all(f);
    held_t held = held_after(&copy), nothing = {0}, before = held_before(&copy);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.resident_bytes, 2 * MIB);
    assert_int_equal(held.of[0][0].resident_bytes, 2 * MIB);
    assert_int_equal(held.of[0][0].paused_bytes, 0);
    assert_int_equal(held.of[1][0].paused_bytes, 4 * MIB);
    assert_memory_equal(&before, &nothing, sizeof nothing);
    ASSERT_OK(resume_all(f, &error), error);
    copy = copy_all(f);
    held = held_after(&copy);
    held_t now = held_now(f);
    assert_memory_equal(&held, &now, sizeof held);
    before = held_before(&copy);
    assert_memory_equal(&before, &nothing, sizeof nothing);
}

/* ---- many ---- */

/* More pairs of tag and device than a call sums up at once. */
static void many_tags_are_all_told(void **state) {
    fixture_t *f = *state;
    enum { MANY = 3 * TMS_ACCOUNT_SLOTS / 2 };
    tms_error_t error;
    static tms_event_t many[8 * MANY];
    uint64_t paused = 0, rows = 0;
    use_ring(f, 8 * MANY);
    for (int i = 0; i < 2 * MANY; i++) {
        char name[16];
        snprintf(name, sizeof name, "tag %d", i % MANY);
        tms_region_t region = {.managed = true};
        uint64_t address = 0;
        ASSERT_OK(tms_tag_intern(&f->regions.tags, name, &region.tag, &error), error);
        ASSERT_OK(tms_allocation_create(&f->saver, &region, 1, 0, &address, &error), error);
    }
    ASSERT_OK(pause_all(f, &error), error);
    tms_events_copy_t copy = {.events = many, .event_room = 8 * MANY, .levels = levels, .level_room = LEVELS};
    tms_inspect_copy_events(&f->saver, &copy);
    for (size_t i = 0; i < copy.event_count; i++) {
        if (many[i].kind != TMS_EVENT_MOVE) continue;
        rows++;
        assert_int_equal(many[i].change.paused_bytes, many[i].allocations * 2 * MIB);
        paused += many[i].change.paused_bytes;
    }
    assert_int_equal(paused, 2 * MANY * 2 * MIB);
    assert_in_range(rows, MANY, 2 * MANY);
    /* 3 tags of 30 segments each in turn are 3 events. */
    ASSERT_OK(resume_all(f, &error), error);
    while (f->saver.registry.first) ASSERT_OK(tms_free_address(&f->saver, f->saver.registry.first->begin, &error), error);
    for (int i = 0; i < 90; i++) (void)allocate(f, tags[i % TAGS], TMS_BACKUP_NONE, 1);
    uint64_t begin = f->saver.events.recorded;
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(f->saver.events.recorded - begin, 6 + TAGS);
    copy.level_room = 1; /* too few: the number says so */
    copy.levels = levels;
    tms_inspect_copy_events(&f->saver, &copy);
    assert_int_equal(copy.level_count, 90);
}

static void a_forked_child_holds_nothing(void **state) {
    fixture_t *f = *state;
    use_ring(f, ROOM);
    (void)allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    atomic_store(&f->saver.forked, true);
    tms_events_copy_t copy = copy_all(f);
    atomic_store(&f->saver.forked, false);
    assert_int_equal(copy.level_count, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(totals_are_true_after_a_wrap, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(damage_is_told, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(many_tags_are_all_told, setup_large_device, teardown),
        cmocka_unit_test_setup_teardown(a_forked_child_holds_nothing, setup_one_device, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
