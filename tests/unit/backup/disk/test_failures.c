/* Guards backup/disk/copy.c on systems that lack a feature: copies succeed without io_uring, threads (pthread_create) or
 * direct I/O. */
#include "support/disk_failures_fixture.h"

/* Saves and loads under the injected failures, and returns what was logged. The contents must be right in every other way
 * of copying, too. */
static void assert_works(fixture_t *f, uint64_t address, uint32_t seed, char *logged) {
    tms_backup_t backup = prepared(f, BYTES);
    int descriptors = count_descriptors();
    captured_stderr_t captured = capture_begin();
    clear_calls();
    save_one(f, &backup, address);
    assert_loads(f, &backup, address, seed);
    capture_end(captured, logged, TEXT_BYTES);
    assert_nothing_held();
    assert_int_equal(count_descriptors(), descriptors);
    reset_faults();
    f->saver.stores.disk.has_indirect = false;
    set_way(f, BY_URING);
    assert_loads(f, &backup, address, seed);
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* ---- io_uring ---- */

static void without_io_uring_threads_copy(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    static const struct {
        int error;
        unsigned lines; /* at the default level; each of the two calls logs one line */
    } refusals[] = {{ENOSYS, 0}, {EPERM, 0}, {ENOMEM, 2}, {EMFILE, 2}};
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 1);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        fault.setup_error = refusals[i].error;
        assert_works(f, address, 1, logged);
        assert_logged(logged, refusals[i].lines, "io_uring_setup failed");
    }
    tms_log_init(&f->log, TMS_LOG_INFO); /* at level info, the usual case is logged once */
    f->saver.stores.disk.warned_no_uring = false;
    fault.setup_error = EPERM;
    assert_works(f, address, 1, logged);
    assert_logged(logged, 1, "io_uring is not available (io_uring_setup: Operation not permitted)");
}

static void requests_refused_by_io_uring_go_to_threads(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 2);
    for (int after = 0; after < PIECES - 1; after++) {
        static const int errors[] = {EAGAIN, EBUSY, EBADF};
        fault.submit_error = errors[after % 3];
        fault.submit_after = after;
        assert_works(f, address, 2, logged);
        /* The first submission of the load fails at once. */
        assert_logged(logged, 2, "io_uring_enter failed");
    }
}

/* Transfers complete even if the wait for them fails. */
static void a_failed_wait_does_not_fail_the_call(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    static const int errors[] = {EINTR, ETIME, EBADF, EINVAL};
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 3);
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        fault.wait_error = errors[i];
        assert_works(f, address, 3, logged);
        assert_logged(logged, 0, "");
    }
}

/* The rest, or all, is transferred again, which succeeds or names the error. */
static void short_and_failed_completions_are_retried(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    static const uint32_t short_by[] = {ALIGNMENT, (uint32_t)BUFFER, 512, 1, (uint32_t)BUFFER + 513};
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 4);
    for (size_t i = 0; i < sizeof short_by / sizeof *short_by; i++) {
        fault.short_by = short_by[i];
        assert_works(f, address, 4, logged);
        assert_logged(logged, 0, "");
    }
    fault.bad_descriptor = true;
    assert_works(f, address, 4, logged);
    assert_logged(logged, 0, "");

    tms_error_t error;
    tms_backup_t backup = prepared(f, BYTES);
    save_one(f, &backup, address);
    assert_int_equal(truncate(disk_file_of(f, &backup)->path, 100), 0);
    fault.bad_descriptor = true;
    assert_int_equal(load_one(f, &backup, address, &error), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, "it ends at offset 100"));
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* ---- threads ---- */

static void the_threads_that_could_be_started_copy(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    uint64_t address = allocate_filled(f, 5);
    for (int threads = 0; threads <= TMS_MAX_DISK_WORKERS; threads++) {
        set_way(f, BY_THREADS);
        /* Counted over both calls: the load gets the threads that the save has left. */
        fault.threads_after = threads;
        assert_works(f, address, 5, logged);
        assert_logged(logged, threads == TMS_MAX_DISK_WORKERS ? 1 : 2, "pthread_create failed");
    }
}

/* ---- direct I/O ---- */

static void refused_direct_io_uses_the_page_cache(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    static const struct {
        int open_error, transfer_error;
        way_t way;
    } refusals[] = {{EINVAL, 0, BY_URING},
                    {EINVAL, 0, BY_THREADS},
                    {0, EINVAL, BY_THREADS},
                    {0, EFAULT, BY_THREADS},
                    {0, EOPNOTSUPP, BY_THREADS}};
    uint64_t address = allocate_filled(f, 6);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        if (!has_way(refusals[i].way)) continue;
        set_way(f, refusals[i].way);
        fault.direct_open_error = refusals[i].open_error;
        fault.direct_transfer_error = refusals[i].transfer_error;
        assert_works(f, address, 6, logged);
        assert_logged(logged, 0, "");
    }
    if (!has_way(BY_THREADS)) return;
    tms_log_init(&f->log, TMS_LOG_INFO);
    set_way(f, BY_THREADS);
    fault.direct_transfer_error = EINVAL;
    assert_works(f, address, 6, logged);
    assert_logged(logged, 1, "refuses direct I/O (Invalid argument)");
}

/* Also if the kernel reported it: the thread of the request finds that direct I/O is not supported at all. */
static void a_refusal_by_io_uring_is_detected(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 7);
    fault.bad_descriptor = true;
    fault.direct_transfer_error = EINVAL;
    tms_log_init(&f->log, TMS_LOG_INFO);
    assert_works(f, address, 7, logged);
    assert_logged(logged, 1, "refuses direct I/O");
}

static void unaligned_memory_uses_the_page_cache(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_backup_t backup = prepared(f, BYTES);
    char *memory = malloc(BYTES + 1);
    assert_non_null(memory);
    fill((uint64_t)memory + 1, BYTES, 8);
    clear_calls();
    ASSERT_OK(tms_disk_file_write(disk_file_of(f, &backup), memory + 1, BYTES, 0, &CONTEXT, &error), error);
    memset(memory, 0, BYTES + 1);
    ASSERT_OK(tms_disk_file_read(disk_file_of(f, &backup), memory + 1, BYTES, 0, &CONTEXT, &error), error);
    assert_filled((uint64_t)memory + 1, BYTES, 8);
    assert_int_equal(calls.direct_opens, 0);
    free(memory);
    tms_backup_destroy(&backup, &f->saver.stores);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        COPIES(without_io_uring_threads_copy),          COPIES(requests_refused_by_io_uring_go_to_threads),
        COPIES(a_failed_wait_does_not_fail_the_call),   COPIES(short_and_failed_completions_are_retried),
        COPIES(the_threads_that_could_be_started_copy), COPIES(refused_direct_io_uses_the_page_cache),
        COPIES(a_refusal_by_io_uring_is_detected),      COPIES(unaligned_memory_uses_the_page_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
