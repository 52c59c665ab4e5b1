/* Guards the quarantine: a refused resource is kept, counted by kind, retried once a call, and removed when it is released.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/quarantine.h"

/* A resource with parts, each of which is released after this many refusals. */
typedef struct thing {
    int handle_refusals;
    tms_quarantined_t node; /* not first, as in a segment */
    int range_refusals, host_refusals, tries;
    bool *freed;
} thing_t;

enum { ALL_BUT_HOST_MEMORY = false, HOST_MEMORY = true };
static tms_quarantine_t quarantine;

static thing_t *thing_of(tms_quarantined_t *node) { return (thing_t *)(void *)((char *)node - offsetof(thing_t, node)); }

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    thing_t *thing = thing_of(node);
    assert_ptr_equal(node->context, &quarantine);
    assert_int_equal(pthread_mutex_trylock(&quarantine.lock), 0); /* not held during a retry */
    pthread_mutex_unlock(&quarantine.lock);
    thing->tries++;
    tms_quarantine_mask_t left = 0;
    if (thing->handle_refusals > 0 && --thing->handle_refusals > 0) left |= TMS_QUARANTINE_BIT(HANDLE);
    if (thing->range_refusals > 0 && --thing->range_refusals > 0) left |= TMS_QUARANTINE_BIT(RANGE);
    if (thing->host_refusals > 0 && --thing->host_refusals > 0) left |= TMS_QUARANTINE_BIT(HOST);
    if (left) return left;
    *thing->freed = true;
    free(thing);
    return 0;
}

static thing_t *add_thing(thing_t thing, bool *freed) {
    thing_t *added = calloc(1, sizeof *added);
    assert_non_null(added);
    *freed = false;
    *added = thing;
    added->freed = freed;
    added->node = (tms_quarantined_t){.retry = retry,
                                      .context = &quarantine,
                                      .holds = (thing.handle_refusals ? TMS_QUARANTINE_BIT(HANDLE) : 0) |
                                               (thing.range_refusals ? TMS_QUARANTINE_BIT(RANGE) : 0) |
                                               (thing.host_refusals ? TMS_QUARANTINE_BIT(HOST) : 0)};
    tms_quarantine_add(&quarantine, &added->node);
    return added;
}

static thing_t *add(int handle_refusals, int range_refusals, bool *freed) {
    return add_thing((thing_t){.handle_refusals = handle_refusals, .range_refusals = range_refusals}, freed);
}

static void assert_held(uint64_t handles, uint64_t ranges) {
    assert_int_equal(tms_quarantine_held(&quarantine, TMS_QUARANTINE_HANDLE), handles);
    assert_int_equal(tms_quarantine_held(&quarantine, TMS_QUARANTINE_RANGE), ranges);
    assert_int_equal(tms_quarantine_held(&quarantine, TMS_QUARANTINE_HOST), 0);
    assert_int_equal(tms_quarantine_held(&quarantine, TMS_QUARANTINE_OTHER), 0);
    assert_int_equal(tms_quarantine_is_empty(&quarantine), handles + ranges == 0);
}

static int make(void **state) {
    (void)state;
    tms_error_t error;
    return tms_quarantine_init(&quarantine, &error) == TMS_OK ? 0 : -1;
}

static int release(void **state) {
    (void)state;
    tms_quarantine_release(&quarantine);
    return 0;
}

static void each_part_is_counted_until_it_is_released(void **state) {
    (void)state;
    bool first, second;
    add(1, 2, &first);
    add(0, 3, &second);
    assert_held(1, 2);
    tms_quarantine_retry(&quarantine);
    assert_held(0, 2);
    tms_quarantine_retry(&quarantine);
    assert_held(0, 1);
    assert_true(first);
    assert_false(second);
    tms_quarantine_retry(&quarantine);
    assert_held(0, 0);
    assert_true(second);
    tms_quarantine_retry(&quarantine); /* nothing to do */
}

static void a_retry_tries_each_once(void **state) {
    (void)state;
    bool freed;
    thing_t *thing = add(3, 0, &freed);
    tms_quarantine_retry(&quarantine);
    assert_int_equal(thing->tries, 1);
    tms_quarantine_retry(&quarantine);
    assert_int_equal(thing->tries, 2);
    tms_quarantine_retry(&quarantine);
    assert_true(freed);
}

static void host_memory_is_retried_by_itself(void **state) {
    (void)state;
    bool freed[3];
    thing_t *rest = add(2, 0, &freed[0]), *host = add_thing((thing_t){.host_refusals = 3}, &freed[1]);
    thing_t *mixed = add_thing((thing_t){.host_refusals = 1, .handle_refusals = 2}, &freed[2]);
    tms_quarantine_retry_part(&quarantine, HOST_MEMORY);
    assert_int_equal(rest->tries, 0);
    assert_int_equal(host->tries, 1);
    assert_int_equal(mixed->tries, 1);
    assert_int_equal(tms_quarantine_held(&quarantine, TMS_QUARANTINE_HOST),
                     1); /* the other has none left: it counts as "other" */
    assert_int_equal(tms_quarantine_held(&quarantine, TMS_QUARANTINE_HANDLE), 2);
    tms_quarantine_retry_part(&quarantine, ALL_BUT_HOST_MEMORY);
    assert_int_equal(host->tries, 1);
    assert_true(freed[2]);
    assert_int_equal(rest->tries, 1);
    tms_quarantine_retry_part(&quarantine, ALL_BUT_HOST_MEMORY);
    assert_true(freed[0]);
    tms_quarantine_retry_part(&quarantine, ALL_BUT_HOST_MEMORY); /* nothing to do */
    assert_int_equal(host->tries, 1);
    tms_quarantine_retry_part(&quarantine, HOST_MEMORY);
    assert_false(freed[1]);
    tms_quarantine_retry(&quarantine); /* all of it */
    assert_true(freed[1]);
    assert_held(0, 0);
}

static void release_tries_once_more(void **state) {
    (void)state;
    bool freed;
    add(1, 1, &freed);
    tms_quarantine_release(&quarantine);
    assert_true(freed);
    assert_int_equal(make(NULL), 0);
}

static void a_forked_child_forgets_the_parents_entries(void **state) {
    (void)state;
    bool freed;
    thing_t *thing = add(1, 1, &freed);
    pthread_mutex_lock(&quarantine.lock); /* as process.c does before a fork */
    pid_t child = fork();
    if (child == 0) {
        tms_quarantine_after_fork_in_child(&quarantine);
        bool empty = tms_quarantine_is_empty(&quarantine) && tms_quarantine_held(&quarantine, TMS_QUARANTINE_HANDLE) == 0;
        tms_quarantine_retry(&quarantine);
        add(1, 0, &freed); /* and can be used */
        tms_quarantine_retry(&quarantine);
        _exit(empty && thing->tries == 0 && freed ? 0 : 1);
    }
    pthread_mutex_unlock(&quarantine.lock);
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_held(1, 1);
    tms_quarantine_retry(&quarantine);
    assert_true(freed);
}

/* Whatever two threads do concurrently, one of them at a time retries each entry, and it is freed once. */
enum { THREADS = 2, THINGS = 200 };
static bool freed_by_threads[THREADS][THINGS];

/* cmocka is not thread-safe. */
static tms_quarantine_mask_t retry_quietly(tms_quarantined_t *node) {
    thing_t *thing = thing_of(node);
    if (--thing->handle_refusals > 0) return TMS_QUARANTINE_BIT(HANDLE);
    *thing->freed = true;
    free(thing);
    return 0;
}

static void *add_and_retry_quietly(void *argument) {
    bool *freed = argument;
    for (int i = 0; i < THINGS; i++) {
        thing_t *thing = calloc(1, sizeof *thing);
        if (!thing) abort();
        *thing = (thing_t){.handle_refusals = 1 + i % 3, .freed = &freed[i]};
        thing->node = (tms_quarantined_t){.retry = retry_quietly, .holds = TMS_QUARANTINE_BIT(HANDLE)};
        tms_quarantine_add(&quarantine, &thing->node);
        tms_quarantine_retry(&quarantine);
    }
    return NULL;
}

static void threads_share_it(void **state) {
    (void)state;
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, add_and_retry_quietly, freed_by_threads[i]), 0);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 3; i++) tms_quarantine_retry(&quarantine);
    assert_held(0, 0);
    for (int i = 0; i < THREADS; i++) {
        for (int k = 0; k < THINGS; k++) assert_true(freed_by_threads[i][k]);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make, release)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(each_part_is_counted_until_it_is_released),
        TEST(a_retry_tries_each_once),
        TEST(host_memory_is_retried_by_itself),
        TEST(release_tries_once_more),
        TEST(threads_share_it),
        TEST(a_forked_child_forgets_the_parents_entries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
