/* Guards backup/disk/copy.c on systems that lack a feature: copies succeed without threads (pthread_create) or direct
 * I/O, and if transfers are short. */
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
    set_way(f, DIRECT);
    assert_loads(f, &backup, address, seed);
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* The rest is transferred by more calls. */
static void short_transfers_are_continued(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    static const size_t short_by[] = {ALIGNMENT, BUFFER - ALIGNMENT};
    if (!has_way(DIRECT)) skip();
    uint64_t address = allocate_filled(f, 4);
    for (size_t i = 0; i < sizeof short_by / sizeof *short_by; i++) {
        fault.short_by = short_by[i];
        assert_works(f, address, 4, logged);
        assert_logged(logged, 0, "");
    }
}

/* ---- threads ---- */

static void the_threads_that_could_be_started_copy(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    uint64_t address = allocate_filled(f, 5);
    for (int threads = 0; threads <= TMS_DISK_WORKERS_MOST; threads++) {
        /* Counted over both calls: the load gets the threads that the save has left. */
        fault.threads_after = threads;
        assert_works(f, address, 5, logged);
        assert_logged(logged, threads == TMS_DISK_WORKERS_MOST ? 1 : 2, "pthread_create failed");
    }
}

/* ---- direct I/O ---- */

static void refused_direct_io_uses_the_page_cache(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    static const struct {
        int open_error, transfer_error;
    } refusals[] = {{EINVAL, 0}, {0, EINVAL}, {0, EFAULT}, {0, EOPNOTSUPP}};
    if (!has_way(DIRECT)) skip();
    uint64_t address = allocate_filled(f, 6);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        fault.direct_open_error = refusals[i].open_error;
        fault.direct_transfer_error = refusals[i].transfer_error;
        assert_works(f, address, 6, logged);
        assert_logged(logged, 0, "");
    }
    tms_log_init(&f->log, TMS_LOG_INFO);
    fault.direct_transfer_error = EINVAL;
    assert_works(f, address, 6, logged);
    assert_logged(logged, 1, "refuses direct I/O (Invalid argument)");
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
        COPIES(short_transfers_are_continued),
        COPIES(the_threads_that_could_be_started_copy),
        COPIES(refused_direct_io_uses_the_page_cache),
        COPIES(unaligned_memory_uses_the_page_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
