/* Guards region.c: the stack of settings of each thread. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "core/model/region.h"

static tms_region_defaults_t defaults;
static tms_error_t error;

static int make(void **state) {
    (void)state;
    const tms_config_t config = {.init_cpu_backup_backend = TMS_BACKUP_PINNED};
    return tms_region_init(&defaults, &config, &error) == TMS_OK ? 0 : -1;
}

static int release(void **state) {
    (void)state;
    tms_region_release(&defaults);
    return 0;
}

/* Every number but 0 means that allocations are managed. */
typedef enum management { UNMANAGED = 0, MANAGED = 1, MANAGED_BY_ANOTHER_NUMBER = 7 } management_t;

static tms_region_settings_t settings_of(const char *tag, int backup, management_t managed) {
    return (tms_region_settings_t){.managed = managed, .backup = backup, .tag = tag};
}

static void assert_region(const char *tag, tms_backup_kind_t backup, management_t managed, int expected_depth) {
    int depth = -1;
    tms_region_t region = tms_region_current(&defaults, &depth);
    assert_string_equal(region.tag->name, tag);
    assert_int_equal(region.backup, backup);
    assert_int_equal(region.managed, managed);
    assert_int_equal(depth, expected_depth);
}

static uint64_t enter(const char *tag, int backup, management_t managed) {
    uint64_t id = 0;
    tms_region_settings_t settings = settings_of(tag, backup, managed);
    assert_int_equal(tms_region_enter(&defaults, &settings, false, &id, &error), TMS_OK);
    assert_int_not_equal(id, 0);
    return id;
}

static void test_nesting(void **state) {
    (void)state;
    assert_region(TMS_DEFAULT_TAG, TMS_BACKUP_NONE, UNMANAGED, 0);
    uint64_t a = enter("a", TMS_BACKUP_PINNED, MANAGED), b = enter("b", TMS_BACKUP_DISK, MANAGED_BY_ANOTHER_NUMBER);
    assert_region("b", TMS_BACKUP_DISK, MANAGED, 2);
    uint64_t again = enter("a", TMS_BACKUP_NONE, UNMANAGED);
    assert_region("a", TMS_BACKUP_NONE, UNMANAGED, 3);
    assert_int_equal(tms_region_leave(&defaults, again), 0);
    assert_region("b", TMS_BACKUP_DISK, MANAGED, 2);
    assert_int_equal(tms_region_leave(&defaults, again), TMS_NO_SUCH_REGION);
    assert_region("b", TMS_BACKUP_DISK, MANAGED, 2);
    assert_int_equal(tms_region_leave(&defaults, b), 0);
    assert_int_equal(tms_region_leave(&defaults, a), 0);
    assert_region(TMS_DEFAULT_TAG, TMS_BACKUP_NONE, UNMANAGED, 0);
    assert_string_equal(tms_region_current(&defaults, NULL).tag->name, TMS_DEFAULT_TAG);
}

static void test_levels_are_left_in_any_order(void **state) {
    (void)state;
    uint64_t a = enter("a", TMS_BACKUP_PINNED, MANAGED), b = enter("b", TMS_BACKUP_NONE, UNMANAGED),
             c = enter("c", TMS_BACKUP_DISK, MANAGED);
    assert_int_equal(tms_region_leave(&defaults, a), 2); /* tasks on this thread leave in any order */
    assert_region("c", TMS_BACKUP_DISK, MANAGED, 2);
    assert_int_equal(tms_region_leave(&defaults, a), TMS_NO_SUCH_REGION);
    uint64_t d = enter("d", TMS_BACKUP_MMAP, MANAGED);
    assert_int_equal(tms_region_leave(&defaults, c), 1);
    assert_region("d", TMS_BACKUP_MMAP, MANAGED, 2);
    assert_int_equal(tms_region_leave(&defaults, d), 0);
    assert_region("b", TMS_BACKUP_NONE, UNMANAGED, 1);
    assert_int_equal(tms_region_leave(&defaults, b), 0);
    assert_region(TMS_DEFAULT_TAG, TMS_BACKUP_NONE, UNMANAGED, 0);
    assert_int_equal(tms_region_leave(&defaults, b), TMS_NO_SUCH_REGION);
    assert_int_equal(tms_region_leave(&defaults, 0), TMS_NO_SUCH_REGION); /* the initial settings stay */
}

static void test_a_left_level_makes_room_for_another(void **state) {
    (void)state;
    uint64_t ids[TMS_REGION_MAX_DEPTH];
    for (int i = 0; i < TMS_REGION_MAX_DEPTH; i++)
        ids[i] = enter(i == TMS_REGION_MAX_DEPTH - 1 ? "last" : "a", i % 4, MANAGED);
    assert_int_equal(tms_region_leave(&defaults, ids[0]), TMS_REGION_MAX_DEPTH - 1);
    assert_region("last", (TMS_REGION_MAX_DEPTH - 1) % 4, MANAGED, TMS_REGION_MAX_DEPTH - 1);
    uint64_t one_more = enter("b", TMS_BACKUP_NONE, MANAGED);
    assert_int_equal(tms_region_leave(&defaults, one_more), 0);
    for (int i = 1; i < TMS_REGION_MAX_DEPTH; i++)
        assert_int_equal(tms_region_leave(&defaults, ids[i]), TMS_REGION_MAX_DEPTH - 1 - i);
    assert_region(TMS_DEFAULT_TAG, TMS_BACKUP_NONE, UNMANAGED, 0);
}

static void *leave_a_region_of_another_thread(void *argument) {
    uint64_t own = enter("own", TMS_BACKUP_NONE, MANAGED);
    int left = tms_region_leave(&defaults, *(const uint64_t *)argument);
    return (void *)(intptr_t)(left == TMS_NO_SUCH_REGION && tms_region_leave(&defaults, own) == 0);
}

static void test_a_level_ends_if_another_thread_leaves_it(void **state) {
    (void)state;
    pthread_t thread;
    void *as_expected = NULL;
    uint64_t id = enter("a", TMS_BACKUP_PINNED, MANAGED);
    assert_int_equal(pthread_create(&thread, NULL, leave_a_region_of_another_thread, &id), 0);
    pthread_join(thread, &as_expected);
    assert_non_null(as_expected);
    assert_region(TMS_DEFAULT_TAG, TMS_BACKUP_NONE, UNMANAGED, 0);
    assert_int_equal(tms_region_leave(&defaults, id + 2), TMS_NO_SUCH_REGION); /* nobody has entered it yet */
    uint64_t next = enter("b", TMS_BACKUP_PINNED, MANAGED);
    assert_int_equal(next, id + 2);
    assert_region("b", TMS_BACKUP_PINNED, MANAGED, 1);
    assert_int_equal(tms_region_leave(&defaults, id), TMS_NO_SUCH_REGION);
    assert_int_equal(tms_region_leave(&defaults, next), 0);
}

/* A thread in regions that follow another's: of "a", of "b" inside, and an own one of "a" inside that. It goes on by one
 * step for each of the other thread. */
typedef struct follower {
    pthread_barrier_t step;
    tms_region_t current[3]; /* its settings after each step */
    int depth[3];
    int left[3];
} follower_t;

static uint64_t follow(const char *tag) {
    uint64_t id = 0;
    tms_region_settings_t settings = settings_of(tag, TMS_BACKUP_PINNED, MANAGED);
    assert_int_equal(tms_region_enter(&defaults, &settings, true, &id, &error), TMS_OK);
    return id;
}

static void *run_follower(void *argument) {
    follower_t *follower = argument;
    uint64_t a = follow("a"), b = follow("b"), own = enter("a", TMS_BACKUP_NONE, MANAGED);
    for (int step = 0; step < 3; step++) {
        if (step == 2) follower->left[0] = tms_region_leave(&defaults, own);
        pthread_barrier_wait(&follower->step);
        pthread_barrier_wait(&follower->step);
        follower->current[step] = tms_region_current(&defaults, &follower->depth[step]);
    }
    follower->left[1] = tms_region_leave(&defaults, b);
    follower->left[2] = tms_region_leave(&defaults, a);
    return NULL;
}

static void test_a_region_that_follows_is_ended_by_another_thread(void **state) {
    (void)state;
    follower_t follower = {.left = {-1, -1, -1}};
    const char *const ended[] = {"a", "none has this tag", "b"}, *const expected[] = {"a", "a", TMS_DEFAULT_TAG};
    pthread_t thread;
    uint64_t own = follow("b");
    pthread_barrier_init(&follower.step, NULL, 2);
    assert_int_equal(pthread_create(&thread, NULL, run_follower, &follower), 0);
    for (int step = 0; step < 3; step++) {
        pthread_barrier_wait(&follower.step);
        tms_region_end_following(&defaults, ended[step]);
        assert_region("b", TMS_BACKUP_PINNED, MANAGED, 1); /* the calling thread stays in its own */
        pthread_barrier_wait(&follower.step);
    }
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&follower.step);
    for (int step = 0; step < 3; step++) {
        assert_string_equal(follower.current[step].tag->name, expected[step]);
        assert_int_equal(follower.depth[step], step < 2 ? 3 : 2); /* what was ended is still to be left */
    }
    assert_false(follower.current[2].managed);
    for (int i = 0; i < 3; i++) assert_int_equal(follower.left[i], 0);
    assert_int_equal(tms_region_leave(&defaults, own), 0);
    uint64_t later = follow("b"); /* what ended others does not end it */
    assert_region("b", TMS_BACKUP_PINNED, MANAGED, 1);
    assert_int_equal(tms_region_leave(&defaults, later), 0);
}

/* Another thread ends what this one, which had ended others, is in. */
static void *end_following_b(void *unused) {
    tms_region_end_following(&defaults, "b");
    return unused;
}

static void end_b_on_another_thread(void) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, end_following_b, NULL), 0);
    pthread_join(thread, NULL);
}

static void test_a_thread_that_ended_others_is_ended_as_well(void **state) {
    (void)state;
    uint64_t own = follow("b");
    tms_region_end_following(&defaults, "b");
    assert_region("b", TMS_BACKUP_PINNED, MANAGED, 1);
    end_b_on_another_thread();
    assert_region(TMS_DEFAULT_TAG, TMS_BACKUP_NONE, UNMANAGED, 1);
    tms_region_end_following(&defaults, "b"); /* does not bring it back */
    assert_region(TMS_DEFAULT_TAG, TMS_BACKUP_NONE, UNMANAGED, 1);
    assert_int_equal(tms_region_leave(&defaults, own), 0);
}

static void test_set_puts_settings_in_force_in_a_region_that_follows(void **state) {
    (void)state;
    const tms_region_settings_t b = settings_of("b", TMS_BACKUP_MMAP, MANAGED);
    assert_int_equal(tms_region_leave(&defaults, follow("b")), 0); /* so that the tag exists */
    uint64_t own = follow("a");
    end_b_on_another_thread();
    assert_region("a", TMS_BACKUP_PINNED, MANAGED, 1);
    for (int time = 0; time < 2; time++) { /* in a region that was not ended, and in one that was */
        assert_int_equal(tms_region_set(&defaults, &b, &error), TMS_OK);
        assert_region("b", TMS_BACKUP_MMAP, MANAGED, 1);
        end_b_on_another_thread();
        assert_region(TMS_DEFAULT_TAG, TMS_BACKUP_NONE, UNMANAGED, 1);
    }
    assert_int_equal(tms_region_leave(&defaults, own), 0);
}

static void test_depth_is_bounded(void **state) {
    (void)state;
    uint64_t id = 0;
    tms_region_settings_t settings = settings_of("one too many", TMS_BACKUP_NONE, MANAGED);
    for (int i = 1; i <= TMS_REGION_MAX_DEPTH; i++) (void)enter("a", TMS_BACKUP_NONE, MANAGED);
    assert_int_equal(tms_region_enter(&defaults, &settings, false, &id, &error), TMS_INVALID_STATE);
    assert_int_equal(id, 0);
    assert_non_null(strstr(error.message, "64 nested regions"));
    assert_null(tms_tag_find(&defaults.tags, "one too many"));
    assert_region("a", TMS_BACKUP_NONE, MANAGED, TMS_REGION_MAX_DEPTH);
}

static void test_bad_settings_change_nothing(void **state) {
    (void)state;
    const tms_region_settings_t bad[] = {settings_of(NULL, TMS_BACKUP_NONE, MANAGED),
                                         settings_of("", TMS_BACKUP_NONE, MANAGED), settings_of("x", -1, MANAGED),
                                         settings_of("x", TMS_BACKUP_SHARED + 1, MANAGED)};
    (void)enter("a", TMS_BACKUP_PINNED, MANAGED);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        uint64_t id = 0;
        assert_int_equal(tms_region_enter(&defaults, &bad[i], false, &id, &error), TMS_INVALID_ARGUMENT);
        assert_int_equal(id, 0);
        assert_int_equal(tms_region_set(&defaults, &bad[i], &error), TMS_INVALID_ARGUMENT);
        assert_region("a", TMS_BACKUP_PINNED, MANAGED, 1);
    }
    uint64_t id = 0;
    assert_int_equal(tms_region_enter(&defaults, NULL, false, &id, NULL), TMS_INVALID_ARGUMENT);
    assert_null(tms_tag_find(&defaults.tags, "x"));
}

static void test_set_replaces_the_innermost_level(void **state) {
    (void)state;
    tms_region_settings_t settings = settings_of("changed", TMS_BACKUP_MMAP, MANAGED);
    (void)enter("a", TMS_BACKUP_PINNED, MANAGED);
    uint64_t inner = enter("b", TMS_BACKUP_NONE, MANAGED);
    assert_int_equal(tms_region_set(&defaults, &settings, &error), TMS_OK);
    assert_region("changed", TMS_BACKUP_MMAP, MANAGED, 2);
    assert_int_equal(tms_region_leave(&defaults, inner), 0);
    assert_region("a", TMS_BACKUP_PINNED, MANAGED, 1);
}

static void *look_at_initial_level(void *argument) {
    *(tms_region_t *)argument = tms_region_current(&defaults, NULL);
    return NULL;
}

static void test_setting_the_initial_level_affects_this_thread_only(void **state) {
    (void)state;
    pthread_t thread;
    tms_region_t seen;
    tms_region_settings_t settings = settings_of("mine", TMS_BACKUP_DISK, MANAGED);
    assert_int_equal(tms_region_set(&defaults, &settings, &error), TMS_OK);
    assert_region("mine", TMS_BACKUP_DISK, MANAGED, 0);
    assert_string_equal(defaults.initial.tag->name, TMS_DEFAULT_TAG);
    assert_int_equal(pthread_create(&thread, NULL, look_at_initial_level, &seen), 0);
    pthread_join(thread, NULL);
    assert_string_equal(seen.tag->name, TMS_DEFAULT_TAG);
    assert_int_equal(seen.backup, TMS_BACKUP_NONE);
    assert_false(seen.managed);
}

static void test_configuration_gives_the_initial_level(void **state) {
    (void)state;
    tms_region_defaults_t other;
    const tms_config_t config = {
        .init_enable = true, .init_enable_cpu_backup = true, .init_cpu_backup_backend = TMS_BACKUP_MMAP};
    (void)enter("a", TMS_BACKUP_PINNED, MANAGED);
    assert_int_equal(tms_region_init(&other, &config, &error), TMS_OK);
    tms_region_t region = tms_region_current(&other, NULL);
    assert_true(region.managed);
    assert_int_equal(region.backup, TMS_BACKUP_MMAP);
    assert_ptr_equal(region.tag, tms_tag_find(&other.tags, TMS_DEFAULT_TAG));
    /* Created again at the same address: this thread may keep nothing of the previous one. */
    tms_region_settings_t settings = settings_of("old", TMS_BACKUP_NONE, MANAGED);
    assert_int_equal(tms_region_set(&other, &settings, &error), TMS_OK);
    tms_region_release(&other);
    assert_int_equal(tms_region_init(&other, &config, &error), TMS_OK);
    assert_ptr_equal(tms_region_current(&other, NULL).tag, tms_tag_find(&other.tags, TMS_DEFAULT_TAG));
    tms_region_release(&other);
}

enum { THREADS = 4, ROUNDS = 200 };

typedef struct worker {
    pthread_t thread;
    int number;
    int faults;
    tms_tag_t *shared[ROUNDS];
} worker_t;

/* TMS_RUNS=0 is what region(runs=False) requests, for every region. */
static void test_a_process_without_runs(void **state) {
    (void)state;
    tms_error_t error;
    tms_region_t region;
    for (int runs = 0; runs < 2; runs++) {
        static tms_region_defaults_t other;
        const tms_config_t config = {.runs = runs};
        assert_int_equal(tms_region_init(&other, &config, &error), TMS_OK);
        assert_int_equal(tms_region_current(&other, NULL).own_handles, !runs);
        const tms_region_settings_t settings = {.tag = "a", .own_handles = false};
        assert_int_equal(tms_region_from_settings(&other, &settings, &region, &error), TMS_OK);
        assert_int_equal(region.own_handles, !runs);
        tms_region_release(&other);
    }
}

/* Each thread nests differently, and all intern the same names concurrently. */
static void *work(void *argument) {
    worker_t *worker = argument;
    char own[32], shared[32];
    snprintf(own, sizeof(own), "thread-%d", worker->number);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t ids[8];
        for (int i = 0; i < 8; i++) {
            tms_region_settings_t settings = settings_of(own, i % 4, i % 2 ? MANAGED : UNMANAGED);
            if (tms_region_enter(&defaults, &settings, false, &ids[i], NULL) != TMS_OK) worker->faults++;
        }
        for (int i = 7; i >= 0; i--) {
            int depth = -1;
            tms_region_t region = tms_region_current(&defaults, &depth);
            worker->faults += depth != i + 1 || strcmp(region.tag->name, own) != 0 || (int)region.backup != i % 4 ||
                              region.managed != (i % 2 == 1);
            worker->faults += tms_region_leave(&defaults, ids[i]) != 0;
        }
        snprintf(shared, sizeof(shared), "shared-%d", round);
        if (tms_tag_intern(&defaults.tags, shared, &worker->shared[round], NULL) != TMS_OK) worker->faults++;
    }
    return NULL;
}

static void test_threads(void **state) {
    (void)state;
    static worker_t workers[THREADS];
    size_t tags = 0;
    (void)enter("main", TMS_BACKUP_PINNED, MANAGED);
    for (int i = 0; i < THREADS; i++) {
        workers[i].number = i;
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(workers[i].thread, NULL);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(workers[i].faults, 0);
        assert_memory_equal(workers[i].shared, workers[0].shared, sizeof(workers[0].shared));
    }
    for (const tms_tag_t *tag = defaults.tags.first; tag; tag = tag->next) tags++;
    assert_int_equal(tags, 2 + THREADS + ROUNDS); /* "default" and "main" */
    assert_region("main", TMS_BACKUP_PINNED, MANAGED, 1);
}

static void test_a_disabled_process_manages_nothing(void **state) {
    (void)state;
    const tms_config_t config = {.disable = true};
    tms_region_settings_t settings = settings_of("set", TMS_BACKUP_NONE, MANAGED);
    tms_region_release(&defaults);
    assert_int_equal(tms_region_init(&defaults, &config, &error), TMS_OK);
    (void)enter("a", TMS_BACKUP_PINNED, MANAGED);
    assert_region("a", TMS_BACKUP_PINNED, UNMANAGED, 1);
    assert_int_equal(tms_region_set(&defaults, &settings, &error), TMS_OK);
    assert_region("set", TMS_BACKUP_NONE, UNMANAGED, 1);
}

int main(void) {
#define REGION_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        REGION_TEST(test_nesting),
        REGION_TEST(test_levels_are_left_in_any_order),
        REGION_TEST(test_a_left_level_makes_room_for_another),
        REGION_TEST(test_a_level_ends_if_another_thread_leaves_it),
        REGION_TEST(test_a_region_that_follows_is_ended_by_another_thread),
        REGION_TEST(test_a_thread_that_ended_others_is_ended_as_well),
        REGION_TEST(test_set_puts_settings_in_force_in_a_region_that_follows),
        REGION_TEST(test_depth_is_bounded),
        REGION_TEST(test_bad_settings_change_nothing),
        REGION_TEST(test_set_replaces_the_innermost_level),
        REGION_TEST(test_setting_the_initial_level_affects_this_thread_only),
        REGION_TEST(test_configuration_gives_the_initial_level),
        REGION_TEST(test_a_process_without_runs),
        REGION_TEST(test_a_disabled_process_manages_nothing),
        REGION_TEST(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
