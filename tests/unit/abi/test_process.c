/* Guards state.c and process.c: the one state, and what fork and exit do to it. A process never resets its state, so each
 * test runs in a process of its own. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "abi/process.h"
#include "abi/start.h"
#include "own_process.h"
#include "temporary.h"

enum { MAX_KEPT = 8, FILE_BYTES = 1000 };

static char base[TEMPORARY_BYTES];
static const tms_error_context_t context = {.operation = "pause", .device = 0, .tag = "weights"};

/* In the test processes: prints the failure and ends the process with status 1. */
#define CHECK(condition)                                                                                                    \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                 \
            _exit(1);                                                                                                       \
        }                                                                                                                   \
    } while (0)

static unsigned count_files(void) {
    unsigned count = 0;
    DIR *stream = opendir(base);
    for (const struct dirent *entry; stream && (entry = readdir(stream));) count += strncmp(entry->d_name, "tms-", 4) == 0;
    if (stream) closedir(stream);
    return count;
}

static int make(void **state) {
    (void)state;
    return make_temporary_directory(base, "process") ? setenv("TMS_DISK_BACKUP_DIR", base, 1) : -1;
}

static int release(void **state) {
    (void)state;
    return remove_temporary_directory(base);
}

static tms_state_t *made_state(void) {
    tms_error_t error;
    tms_state_t *state = tms_state(&error);
    CHECK(state != NULL);
    return state;
}

static tms_disk_file_t *made_file(tms_state_t *state) {
    tms_disk_file_t *file = NULL;
    tms_error_t error;
    tms_status_t status = tms_disk_file_create(&state->saver.stores.disk, FILE_BYTES, &file, NULL, &context, &error);
    if (status != TMS_OK) fprintf(stderr, "%s\n", error.message);
    CHECK(status == TMS_OK);
    return file;
}

/* A file that stays until the process ends. The test keeps its struct, as a segment would, so that leak checkers find it. */
static tms_disk_file_t *kept_file(tms_state_t *state) {
    static tms_disk_file_t *kept[MAX_KEPT];
    static unsigned count;
    CHECK(count < MAX_KEPT);
    return kept[count++] = made_file(state);
}

static void make_state_once(void) {
    CHECK(tms_state_if_made() == NULL);
    setenv("TMS_LOG_LEVEL", "error", 1);
    setenv("TMS_CUDA_DRIVER", "/nonexistent/driver", 1);
    setenv("TMS_INIT_ENABLE", "1", 1);
    tms_state_t *state = made_state();
    CHECK(tms_state(NULL) == state);
    CHECK(tms_state_if_made() == state);
    CHECK(atomic_load(&state->log.level) == TMS_LOG_ERROR);
    CHECK(strcmp(state->driver.path, "/nonexistent/driver") == 0);
    CHECK(atomic_load(&state->driver.table) == NULL);
    CHECK(tms_region_current(&state->regions, NULL).managed);
    CHECK(strcmp(state->saver.stores.disk.path, base) == 0);
    CHECK(!atomic_load(&state->saver.forked));
    CHECK(count_files() == 0); /* no file, no driver, only the environment */
}

static void test_the_state_is_made_once(void **state) {
    (void)state;
    assert_exits(make_state_once);
}

enum { THREADS = 8 };
static pthread_barrier_t barrier;

static void *get_state(void *argument) {
    (void)argument;
    pthread_barrier_wait(&barrier);
    return tms_state(NULL);
}

static void make_state_on_many_threads(void) {
    pthread_t threads[THREADS];
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, get_state, NULL) == 0);
    for (int i = 0; i < THREADS; i++) {
        void *seen = NULL;
        pthread_join(threads[i], &seen);
        CHECK(seen != NULL && seen == tms_state_if_made());
    }
    kept_file(tms_state_if_made());
}

static void test_threads_get_the_same_state(void **state) {
    (void)state;
    for (int round = 0; round < 10; round++) {
        assert_exits(make_state_on_many_threads);
        assert_int_equal(count_files(), 0);
    }
}

static void leave_files(void) {
    tms_state_t *state = made_state();
    for (int i = 0; i < 3; i++) kept_file(state);
    CHECK(count_files() == 4);
}

static void leave_files_and_die(void) {
    leave_files();
    raise(SIGKILL);
}

static void only_make_the_state(void) { made_state(); }

static void test_exit_removes_the_files(void **state) {
    (void)state;
    assert_exits(leave_files);
    assert_int_equal(count_files(), 0);
    assert_true(WIFSIGNALED(run_in_child(leave_files_and_die)));
    assert_int_equal(count_files(), 4);
    assert_exits(only_make_the_state); /* without a disk backup it accesses no file */
    assert_int_equal(count_files(), 4);
}

/* In a forked child whose parent had not loaded the driver. */
static void use_state_in_child(void) {
    tms_state_t *state = tms_state_if_made();
    CHECK(state != NULL);
    CHECK(!atomic_load(&state->saver.forked));
    CHECK(state->saver.stores.disk.files == NULL);
    CHECK(count_files() == 2);
    tms_tag_t *tag = NULL;
    CHECK(tms_tag_intern(&state->regions.tags, "child", &tag, NULL) == TMS_OK);
    kept_file(state);
    CHECK(count_files() == 4);
}

static void fork_without_a_driver(void) {
    tms_state_t *state = made_state();
    tms_disk_file_t *file = kept_file(state);
    char data[FILE_BYTES] = "contents";
    CHECK(tms_disk_file_write(file, data, FILE_BYTES, 0, &context, NULL) == TMS_OK);
    int status = run_in_child(use_state_in_child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    memset(data, 0, sizeof(data));
    CHECK(count_files() == 2); /* the child's files are gone, the parent's are not */
    CHECK(tms_disk_file_read(file, data, FILE_BYTES, 0, &context, NULL) == TMS_OK);
    CHECK(memcmp(data, "contents", 8) == 0);
    CHECK(!atomic_load(&state->saver.forked));
    CHECK(tms_tag_find(&state->regions.tags, "child") == NULL);
}

static void test_a_child_of_a_process_without_driver_starts_afresh(void **state) {
    (void)state;
    assert_exits(fork_without_a_driver);
    assert_int_equal(count_files(), 0);
}

static void be_a_forked_child(void) {
    tms_state_t *state = tms_state_if_made();
    tms_error_t error;
    CHECK(atomic_load(&state->saver.forked));
    CHECK(!state->saver.transition_running);
    CHECK(tms_saver_check_process(&state->saver, &context, &error) == TMS_FORKED);
    CHECK(strstr(error.message, "spawn or forkserver") != NULL);
    CHECK(pthread_mutex_trylock(&state->saver.lock) == 0);
    pthread_mutex_unlock(&state->saver.lock);
    CHECK(count_files() == 2);
}

static void fork_with_a_driver(void) {
    static const tms_driver_table_t table; /* stands for a loaded driver; it is not called */
    tms_state_t *state = made_state();
    atomic_store(&state->driver.table, &table);
    state->saver.transition_running = true; /* as if on another thread */
    kept_file(state);
    int status = run_in_child(be_a_forked_child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(count_files() == 2);
    CHECK(!atomic_load(&state->saver.forked));
    CHECK(state->saver.transition_running);
    CHECK(tms_saver_check_process(&state->saver, &context, NULL) == TMS_OK);
}

static void test_a_child_of_a_process_with_driver_is_marked(void **state) {
    (void)state;
    assert_exits(fork_with_a_driver);
    assert_int_equal(count_files(), 0);
}

static atomic_bool stop;

/* Takes each of the three locks repeatedly. */
static void *keep_locking(void *argument) {
    tms_state_t *state = argument;
    unsigned round = 0;
    while (!atomic_load(&stop)) {
        char name[32];
        tms_tag_t *tag = NULL;
        pthread_mutex_lock(&state->saver.lock);
        snprintf(name, sizeof(name), "tag-%u", round++ % 50);
        CHECK(tms_tag_intern(&state->regions.tags, name, &tag, NULL) == TMS_OK);
        pthread_mutex_unlock(&state->saver.lock);
        tms_disk_file_destroy(&state->saver.stores.disk, made_file(state));
    }
    return NULL;
}

static void lock_everything(void) {
    tms_state_t *state = tms_state_if_made();
    tms_tag_t *tag = NULL;
    CHECK(pthread_mutex_trylock(&state->saver.lock) == 0);
    pthread_mutex_unlock(&state->saver.lock);
    CHECK(tms_tag_intern(&state->regions.tags, "child", &tag, NULL) == TMS_OK);
    tms_disk_file_destroy(&state->saver.stores.disk, made_file(state));
    _exit(0); /* files in creation have no owner in the child: a leak checker would report them at exit */
}

static void fork_while_locks_are_held(void) {
    pthread_t threads[2];
    tms_state_t *state = made_state();
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, keep_locking, state) == 0);
    for (int round = 0; round < 40; round++) {
        int status = run_in_child(lock_everything);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

static void test_a_fork_while_threads_hold_locks(void **state) {
    (void)state;
    assert_exits(fork_while_locks_are_held);
    assert_int_equal(count_files(), 0);
}

/* Handlers before a fork run in reverse order of registration. This one is registered first, so it runs after ours. */
static unsigned locks_held;

static void try_locks(void) {
    tms_state_t *state = tms_state_if_made();
    pthread_mutex_t *locks[] = {&state->saver.lock, &state->regions.tags.lock, &state->saver.stores.disk.lock,
                                &state->saver.descriptors.lock, &state->saver.shared_page.opening};
    for (size_t i = 0; i < sizeof(locks) / sizeof(locks[0]); i++) {
        if (pthread_mutex_trylock(locks[i]) == 0) {
            pthread_mutex_unlock(locks[i]);
        } else {
            locks_held++;
        }
    }
}

static void do_nothing(void) {}

static void fork_and_look_at_locks(void) {
    CHECK(pthread_atfork(try_locks, NULL, NULL) == 0);
    made_state();
    CHECK(run_in_child(do_nothing) == 0);
    CHECK(locks_held == 5);
    locks_held = 0;
    try_locks();
    CHECK(locks_held == 0);
}

static void test_a_fork_takes_every_lock(void **state) {
    (void)state;
    assert_exits(fork_and_look_at_locks);
}

/* A thread publishes the state and takes a lock during a fork whose handler has found no state. */
static void publish_and_lock(void) {
    if (tms_state_if_made()) return;
    tms_state_t *made = NULL;
    CHECK(tms_state_create(&made, NULL) == TMS_OK);
    CHECK(tms_state_publish(made) == made);
    CHECK(pthread_mutex_lock(&made->saver.lock) == 0);
}

static void take_the_lock(void) { CHECK(pthread_mutex_trylock(&tms_state_if_made()->saver.lock) == 0); }

static void publish_during_a_fork(void) {
    CHECK(pthread_atfork(publish_and_lock, NULL, NULL) == 0);
    for (int i = 0; i < 2; i++) CHECK(tms_process_register(NULL) == TMS_OK);
    CHECK(tms_state_if_made() == NULL);
    CHECK(run_in_child(take_the_lock) == 0);
    tms_state_t *state = made_state();
    CHECK(pthread_mutex_trylock(&state->saver.lock) != 0); /* it is still the other thread's */
    pthread_mutex_unlock(&state->saver.lock);
    CHECK(run_in_child(take_the_lock) == 0);
    CHECK(pthread_mutex_trylock(&state->saver.lock) == 0);
    pthread_mutex_unlock(&state->saver.lock);
}

static void test_the_state_is_published_during_a_fork(void **state) {
    (void)state;
    assert_exits(publish_during_a_fork);
}

static int shared_file;

static void look_for_the_file(void) { _exit(fcntl(shared_file, F_GETFD) < 0 ? 0 : 1); }

static void fork_with_a_shared_file(void) {
    const tms_error_context_t context = {.operation = "test", .device = TMS_NO_DEVICE};
    tms_state_t *state = made_state();
    tms_descriptor_t adopted;
    CHECK(tms_descriptors_adopt(&state->saver.descriptors, open("/dev/null", O_RDONLY), &adopted, &context, NULL) == TMS_OK);
    shared_file = adopted.number;
    CHECK(run_in_child(look_for_the_file) == 0);
    CHECK(fcntl(shared_file, F_GETFD) >= 0);
}

static void test_a_fork_closes_shared_files_in_the_child(void **state) {
    (void)state;
    assert_exits(fork_with_a_shared_file);
}

int main(void) {
#define PROCESS_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        PROCESS_TEST(test_the_state_is_made_once),
        PROCESS_TEST(test_threads_get_the_same_state),
        PROCESS_TEST(test_exit_removes_the_files),
        PROCESS_TEST(test_a_child_of_a_process_without_driver_starts_afresh),
        PROCESS_TEST(test_a_child_of_a_process_with_driver_is_marked),
        PROCESS_TEST(test_a_fork_takes_every_lock),
        PROCESS_TEST(test_a_fork_while_threads_hold_locks),
        PROCESS_TEST(test_the_state_is_published_during_a_fork),
        PROCESS_TEST(test_a_fork_closes_shared_files_in_the_child),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
