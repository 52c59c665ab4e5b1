/* Guards ledger.c: what counts until when, whoever frees it, in every order, with failed calls, many threads and forks. */
#include "base/ledger.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "own_process.h"

enum { MAX_ROWS = 8, MANY = 5000, THREADS = 4 };
/* The call that was to free something has failed, or it has succeeded. */
enum { STILL_THERE = false, GONE = true };

/* An address in this program, and one in the C library. */
static const void *own_code(void) { return (const void *)(uintptr_t)own_code; }
static const void *libc_code(void) { return dlsym(RTLD_NEXT, "gnu_get_libc_version"); }

/* The sum over all rows. */
static tms_library_info_t total(tms_ledger_t *ledger) {
    tms_library_info_t rows[MAX_ROWS], sum = {.path = NULL};
    size_t count = tms_ledger_rows(ledger, rows, MAX_ROWS);
    assert_true(count <= MAX_ROWS);
    for (size_t i = 0; i < count; i++) {
        sum.bytes += rows[i].bytes;
        sum.allocations += rows[i].allocations;
    }
    return sum;
}

static void assert_holds(tms_ledger_t *ledger, uint64_t bytes, uint64_t allocations) {
    tms_library_info_t sum = total(ledger);
    assert_int_equal(sum.bytes, bytes);
    assert_int_equal(sum.allocations, allocations);
}

static int begin(void **state) {
    tms_ledger_t *ledger = malloc(sizeof *ledger);
    if (!ledger) return -1;
    tms_ledger_init(ledger);
    *state = ledger;
    return 0;
}

static int end(void **state) {
    tms_ledger_release(*state);
    free(*state);
    return 0;
}

static void free_address(tms_ledger_t *ledger, uint64_t address) {
    tms_ledger_settle(ledger, tms_ledger_take(ledger, address), GONE);
}

static void release(tms_ledger_t *ledger, uint64_t handle) {
    tms_ledger_settle(ledger, tms_ledger_take_handle(ledger, handle), GONE);
}

static void fail_to_release(tms_ledger_t *ledger, uint64_t handle) {
    tms_ledger_settle(ledger, tms_ledger_take_handle(ledger, handle), STILL_THERE);
}

static void unmap(tms_ledger_t *ledger, uint64_t address, uint64_t bytes) {
    tms_ledger_settle(ledger, tms_ledger_take_mappings(ledger, address, bytes), GONE);
}

static void fail_to_unmap(tms_ledger_t *ledger, uint64_t address, uint64_t bytes) {
    tms_ledger_settle(ledger, tms_ledger_take_mappings(ledger, address, bytes), STILL_THERE);
}

static void rows_are_by_library_and_device(void **state) {
    tms_ledger_t *ledger = *state;
    tms_library_info_t rows[MAX_ROWS];
    assert_int_equal(tms_ledger_rows(ledger, rows, MAX_ROWS), 0);
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 10);
    tms_ledger_add(ledger, own_code(), 1, 0x2000, 20);
    tms_ledger_add(ledger, libc_code(), 1, 0x3000, 40);
    tms_ledger_add(ledger, own_code(), 0, 0x4000, 80);
    assert_int_equal(tms_ledger_rows(ledger, rows, 1), 3);
    assert_int_equal(tms_ledger_rows(ledger, rows, MAX_ROWS), 3);
    assert_non_null(strstr(rows[0].path, "test_ledger"));
    assert_ptr_equal(rows[0].path, rows[1].path);
    assert_non_null(strstr(rows[2].path, "libc.so"));
    const uint64_t expected[][3] = {{0, 90, 2}, {1, 20, 1}, {1, 40, 1}};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(rows[i].device, expected[i][0]);
        assert_int_equal(rows[i].bytes, expected[i][1]);
        assert_int_equal(rows[i].allocations, expected[i][2]);
    }
    free_address(ledger, 0x2000); /* whoever frees it */
    assert_int_equal(tms_ledger_rows(ledger, rows, MAX_ROWS), 2);
    assert_holds(ledger, 130, 3);
}

static void code_in_no_library_has_no_path(void **state) {
    tms_ledger_t *ledger = *state;
    tms_library_info_t row;
    tms_ledger_add(ledger, ledger, -1, 0x1000, 10);
    assert_int_equal(tms_ledger_rows(ledger, &row, 1), 1);
    assert_string_equal(row.path, "");
    assert_int_equal(row.device, -1);
}

static void what_is_not_known_counts_nothing(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 10);
    free_address(ledger, 0x2000);
    release(ledger, 0x1000); /* a handle with the number of an address */
    unmap(ledger, 0x1000, 10);
    tms_ledger_retain_handle(ledger, 0x1000);
    tms_ledger_map(ledger, 0x1000, 10, 77); /* an import */
    unmap(ledger, 0x1000, 10);
    assert_holds(ledger, 10, 1);
}

static void a_free_that_fails_changes_nothing(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 10);
    tms_ledger_taken_t taken = tms_ledger_take(ledger, 0x1000);
    assert_holds(ledger, 10, 1); /* the call is under way */
    tms_ledger_settle(ledger, taken, STILL_THERE);
    assert_holds(ledger, 10, 1);
    free_address(ledger, 0x1000);
    free_address(ledger, 0x1000); /* twice */
    assert_holds(ledger, 0, 0);
}

static void an_address_may_be_allocated_again_during_its_free(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 10);
    tms_ledger_taken_t taken = tms_ledger_take(ledger, 0x1000);
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 20);
    assert_holds(ledger, 30, 2);
    tms_ledger_settle(ledger, taken, GONE);
    assert_holds(ledger, 20, 1);
    taken = tms_ledger_take(ledger, 0x1000);
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 40);
    tms_ledger_settle(ledger, taken, STILL_THERE);
    assert_holds(ledger, 40, 1);
}

static void an_allocation_whose_free_was_not_seen_is_replaced(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 10);
    tms_ledger_add(ledger, libc_code(), 0, 0x1000, 20);
    assert_holds(ledger, 20, 1);
    tms_ledger_add_handle(ledger, own_code(), 0, 0x1000, 40);
    tms_ledger_add_handle(ledger, own_code(), 0, 0x1000, 80);
    assert_holds(ledger, 100, 2);
}

static void physical_memory_counts_until_released_and_unmapped(void **state) {
    tms_ledger_t *ledger = *state;
    for (int unmapped_first = 0; unmapped_first < 2; unmapped_first++) {
        tms_ledger_add_handle(ledger, own_code(), 0, 5, 100);
        tms_ledger_map(ledger, 0x10000, 100, 5);
        tms_ledger_map(ledger, 0x20000, 100, 5);
        if (unmapped_first) {
            unmap(ledger, 0x10000, 100);
            unmap(ledger, 0x20000, 100);
            assert_holds(ledger, 100, 1);
            release(ledger, 5);
        } else {
            release(ledger, 5);
            unmap(ledger, 0x20000, 100);
            assert_holds(ledger, 100, 1);
            unmap(ledger, 0x10000, 100);
        }
        assert_holds(ledger, 0, 0);
    }
}

static void a_retained_handle_needs_more_releases(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add_handle(ledger, own_code(), 0, 5, 100);
    tms_ledger_retain_handle(ledger, 5);
    release(ledger, 5);
    assert_holds(ledger, 100, 1);
    release(ledger, 5);
    assert_holds(ledger, 0, 0);
}

static void a_handle_may_be_used_again_while_its_first_memory_is_mapped(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add_handle(ledger, own_code(), 0, 5, 100);
    tms_ledger_map(ledger, 0x10000, 100, 5);
    release(ledger, 5);
    tms_ledger_add_handle(ledger, own_code(), 0, 5, 200);
    assert_holds(ledger, 300, 2);
    unmap(ledger, 0x10000, 100);
    assert_holds(ledger, 200, 1);
    release(ledger, 5);
    assert_holds(ledger, 0, 0);
}

static void one_unmap_ends_several_mappings(void **state) {
    tms_ledger_t *ledger = *state;
    for (uint64_t handle = 0; handle < 4; handle++) {
        tms_ledger_add_handle(ledger, own_code(), 0, handle, 0x100);
        /* The third is an import: a hole in what is known. */
        if (handle != 2) tms_ledger_map(ledger, 0x10000 + handle * 0x100, 0x100, handle);
        release(ledger, handle);
    }
    assert_holds(ledger, 0x300, 3);
    fail_to_unmap(ledger, 0x10000, 0x400);
    assert_holds(ledger, 0x300, 3);
    unmap(ledger, 0x10000, 0x400);
    assert_holds(ledger, 0, 0);
}

static void releases_and_unmaps_that_fail_change_nothing(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add_handle(ledger, own_code(), 0, 5, 100);
    tms_ledger_map(ledger, 0x10000, 100, 5);
    fail_to_release(ledger, 5);
    fail_to_unmap(ledger, 0x10000, 100);
    assert_holds(ledger, 100, 1);
    release(ledger, 5);
    assert_holds(ledger, 100, 1);
    unmap(ledger, 0x10000, 100);
    assert_holds(ledger, 0, 0);
}

static void two_releases_at_once(void **state) {
    tms_ledger_t *ledger = *state;
    for (int succeeds = 0; succeeds < 4; succeeds++) {
        tms_ledger_add_handle(ledger, own_code(), 0, 5, 100);
        tms_ledger_retain_handle(ledger, 5);
        tms_ledger_taken_t first = tms_ledger_take_handle(ledger, 5), second = tms_ledger_take_handle(ledger, 5);
        tms_ledger_settle(ledger, first, succeeds & 1);
        tms_ledger_settle(ledger, second, succeeds & 2);
        assert_holds(ledger, succeeds == 3 ? 0 : 100, succeeds == 3 ? 0 : 1);
        for (int left = (succeeds & 1 ? 0 : 1) + (succeeds & 2 ? 0 : 1); left > 0; left--) release(ledger, 5);
        assert_holds(ledger, 0, 0);
    }
}

static void a_reset_device_has_nothing(void **state) {
    tms_ledger_t *ledger = *state;
    for (uint64_t i = 0; i < 10; i++) tms_ledger_add(ledger, own_code(), (int)(i % 2), 0x1000 + i, 1);
    tms_ledger_clear_device(ledger, 1);
    assert_holds(ledger, 5, 5);
    free_address(ledger, 0x1001);
    assert_holds(ledger, 5, 5);
}

/* Addresses as a driver gives them: multiples of large powers of two. */
static void many_allocations(void **state) {
    tms_ledger_t *ledger = *state;
    for (int round = 0; round < 2; round++) {
        for (uint64_t i = 0; i < MANY; i++) {
            tms_ledger_add(ledger, own_code(), 0, i << 21, 1);
            tms_ledger_add_handle(ledger, own_code(), 0, i << 21, 2);
            tms_ledger_map(ledger, i << 21, 1 << 21, i << 21);
        }
        assert_holds(ledger, 3 * MANY, 2 * MANY);
        for (uint64_t i = 0; i < MANY; i++) release(ledger, i << 21);
        for (uint64_t i = MANY; i-- > 0;) free_address(ledger, i << 21);
        assert_holds(ledger, 2 * MANY, MANY);
        unmap(ledger, 0, (uint64_t)MANY << 21);
        assert_holds(ledger, 0, 0);
    }
    assert_true(ledger->record_capacity < 4 * MANY); /* records are used again */
}

/* A free takes as long as its search passes occupied slots. */
static void addresses_are_spread_over_the_slots(void **state) {
    enum { SPREAD = 100000, LONGEST = 500 };
    tms_ledger_t *ledger = *state;
    for (uint64_t i = 0; i < SPREAD; i++) tms_ledger_add(ledger, own_code(), 0, i << 21, 1);
    size_t run = 0, longest = 0;
    for (size_t slot = 0; slot < ledger->slot_count; slot++) {
        run = ledger->slots[slot] == TMS_NO_RECORD ? 0 : run + 1;
        if (run > longest) longest = run;
    }
    assert_in_range(longest, 1, LONGEST);
}

static void what_cannot_be_recorded_is_told(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 10);
    const size_t count = ledger->record_count, capacity = ledger->record_capacity;
    ledger->record_count = ledger->record_capacity = TMS_NO_RECORD / 2 + 1; /* as many as there can be */
    tms_ledger_add(ledger, own_code(), 0, 0x2000, 10);
    tms_ledger_add_handle(ledger, own_code(), 0, 5, 10);
    tms_ledger_map(ledger, 0x10000, 10, 5);
    ledger->record_count = count;
    ledger->record_capacity = capacity;
    assert_int_equal(tms_ledger_uncounted(ledger), 2);
    assert_holds(ledger, 10, 1);
    free_address(ledger, 0x2000);
    release(ledger, 5);
    assert_holds(ledger, 10, 1);
}

typedef struct worker {
    tms_ledger_t *ledger;
    uint64_t number;
} worker_t;

static void *work(void *argument) {
    const worker_t *worker = argument;
    const uint64_t base = (worker->number + 1) << 32;
    for (uint64_t i = 0; i < MANY; i++) {
        tms_ledger_add(worker->ledger, worker->number % 2 ? own_code() : libc_code(), 0, base + i, 3);
        tms_ledger_add_handle(worker->ledger, own_code(), 1, base + i, 5);
        tms_ledger_map(worker->ledger, base + i, 1, base + i);
        if (i % 7 == 0) fail_to_release(worker->ledger, base + i);
        release(worker->ledger, base + i);
        if (i > 0) free_address(worker->ledger, base + i - 1);
        if (i > 0) unmap(worker->ledger, base + i - 1, 1);
    }
    return NULL;
}

static void many_threads(void **state) {
    tms_ledger_t *ledger = *state;
    pthread_t threads[THREADS];
    worker_t workers[THREADS];
    for (uint64_t i = 0; i < THREADS; i++) {
        workers[i] = (worker_t){ledger, i};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    assert_holds(ledger, THREADS * 8, THREADS * 2);
    assert_int_equal(tms_ledger_uncounted(ledger), 0);
}

static tms_ledger_t *of_the_child;

static int look_in_the_child(void) {
    tms_library_info_t row;
    if (tms_ledger_rows(of_the_child, &row, 1) != 0) return 1;
    tms_ledger_add(of_the_child, own_code(), 0, 0x1000, 3);
    tms_ledger_settle(of_the_child, tms_ledger_take(of_the_child, 0x2000), GONE); /* the parent's */
    return tms_ledger_rows(of_the_child, &row, 1) == 1 && row.bytes == 3 ? 0 : 2;
}

static void a_forked_child_begins_empty(void **state) {
    tms_ledger_t *ledger = *state;
    tms_ledger_add(ledger, own_code(), 0, 0x1000, 10);
    tms_ledger_add(ledger, own_code(), 0, 0x2000, 10);
    of_the_child = ledger;
    tms_ledger_before_fork(ledger);
    pid_t child = fork();
    if (child == 0) {
        tms_ledger_after_fork_in_child(ledger);
        end_child(look_in_the_child());
    }
    tms_ledger_after_fork_in_parent(ledger);
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_holds(ledger, 20, 2);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)
    const struct CMUnitTest tests[] = {
        TEST(rows_are_by_library_and_device),
        TEST(code_in_no_library_has_no_path),
        TEST(what_is_not_known_counts_nothing),
        TEST(a_free_that_fails_changes_nothing),
        TEST(an_address_may_be_allocated_again_during_its_free),
        TEST(an_allocation_whose_free_was_not_seen_is_replaced),
        TEST(physical_memory_counts_until_released_and_unmapped),
        TEST(a_retained_handle_needs_more_releases),
        TEST(a_handle_may_be_used_again_while_its_first_memory_is_mapped),
        TEST(one_unmap_ends_several_mappings),
        TEST(releases_and_unmaps_that_fail_change_nothing),
        TEST(two_releases_at_once),
        TEST(a_reset_device_has_nothing),
        TEST(many_allocations),
        TEST(addresses_are_spread_over_the_slots),
        TEST(what_cannot_be_recorded_is_told),
        TEST(many_threads),
        TEST(a_forked_child_begins_empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
