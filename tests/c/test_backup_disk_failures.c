/* backup_disk_copy.c where the system or the driver refuses: without io_uring, threads (pthread_create), direct I/O or
 * memory the copies are made all the same; what cannot be done at all is an error that names it; nothing is left over. */
#include "support.h"

#include <sys/ioctl.h>

#include "captured_stderr.h"
#include "disk_copy_fixture.h"

enum { TEXT_BYTES = 8192 };
/* More than are at once with the disk, fewer than there are buffers. The last is too small for direct I/O. */
enum { PIECES = 10 };
static const uint64_t BYTES = (PIECES - 1) * BUFFER + 77;

static uint64_t allocate_filled(fixture_t *f, uint32_t seed) {
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BYTES);
    fill(address, BYTES, seed);
    return address;
}

/* Saves and loads under what fails now, and says what was logged. The contents must be right, also for others. */
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

static void assert_logged(const char *logged, unsigned lines, const char *text) {
    if (count_lines(logged) != lines || (lines > 0 && !strstr(logged, text)))
        fail_msg("not %u lines with '%s': %s", lines, text, logged);
}

/* ---- io_uring ---- */

static void without_io_uring_there_are_threads(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    static const struct {
        int error;
        unsigned lines; /* at the usual level; each of the two calls has one */
    } refusals[] = {{ENOSYS, 0}, {EPERM, 0}, {ENOMEM, 2}, {EMFILE, 2}};
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 1);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        fault.setup_error = refusals[i].error;
        assert_works(f, address, 1, logged);
        assert_logged(logged, refusals[i].lines, "io_uring_setup failed");
    }
    tms_log_init(&f->log, TMS_LOG_INFO); /* what is usual is said once, to who wants to know */
    f->saver.stores.disk.said_no_uring = false;
    fault.setup_error = EPERM;
    assert_works(f, address, 1, logged);
    assert_logged(logged, 1, "there is no io_uring here (io_uring_setup: Operation not permitted)");
}

static void what_io_uring_refuses_goes_to_threads(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 2);
    for (int after = 0; after < PIECES - 1; after++) {
        static const int errors[] = {EAGAIN, EBUSY, EBADF};
        fault.submit_error = errors[after % 3];
        fault.submit_after = after;
        assert_works(f, address, 2, logged);
        /* Of the load the first submission is refused at once. */
        assert_logged(logged, 2, "io_uring_enter failed");
    }
}

/* Transfers end also if nobody can wait for them. */
static void a_wait_that_fails_is_no_failure(void **state) {
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

/* The rest, or all, is transferred once more, which succeeds or names the error. */
static void short_and_failed_completions_are_made_up_for(void **state) {
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
    assert_int_equal(truncate(backup.file->path, 100), 0);
    fault.bad_descriptor = true;
    assert_int_equal(load_one(f, &backup, address, &error), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, "it ends at offset 100"));
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* ---- threads ---- */

static void as_many_threads_as_there_are(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    uint64_t address = allocate_filled(f, 5);
    for (int threads = 0; threads <= TMS_DISK_WORKERS_MOST; threads++) {
        set_way(f, BY_THREADS);
        /* Counted over both calls: the load has those that the save has left. */
        fault.threads_after = threads;
        assert_works(f, address, 5, logged);
        assert_logged(logged, threads == TMS_DISK_WORKERS_MOST ? 1 : 2, "pthread_create failed");
    }
}

/* ---- direct I/O ---- */

static void where_direct_io_is_refused_the_page_cache_is_used(void **state) {
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

/* Also if the kernel said so: the request's own thread finds that it cannot be done directly at all. */
static void a_refusal_by_io_uring_is_noticed(void **state) {
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

static void memory_that_is_not_aligned_goes_through_the_page_cache(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_backup_t backup = prepared(f, BYTES);
    char *memory = malloc(BYTES + 1);
    assert_non_null(memory);
    fill((uint64_t)memory + 1, BYTES, 8);
    clear_calls();
    ASSERT_OK(tms_disk_file_write(backup.file, memory + 1, BYTES, 0, &CONTEXT, &error), error);
    memset(memory, 0, BYTES + 1);
    ASSERT_OK(tms_disk_file_read(backup.file, memory + 1, BYTES, 0, &CONTEXT, &error), error);
    assert_filled((uint64_t)memory + 1, BYTES, 8);
    assert_int_equal(calls.direct_opens, 0);
    free(memory);
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* ---- errors ---- */

/* A write that fails is told by a later call, with what it was about. */
static void a_write_that_fails_later_is_told_with_its_own_backup(void **state) {
    fixture_t *f = *state;
    const tms_error_context_t second = {.operation = "pause", .device = 0, .tag = "second"};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BUFFER);
    FOR_EACH_WAY(way) {
        if (way == BY_URING) continue; /* its writes cannot fail without being tried again by pwrite: below */
        tms_error_t error;
        tms_copier_t copier;
        tms_backup_t backups[] = {prepared(f, BUFFER), prepared(f, BUFFER)};
        int descriptors = count_descriptors();
        set_way(f, way);
        fault.write_error = ENOSPC;
        open_copier(f, &copier, NULL);
        ASSERT_OK(tms_backup_save(&backups[0], &copier, address, &CONTEXT, &error), error);
        ASSERT_OK(tms_backup_save(&backups[1], &copier, address, &second, &error), error);
        for (int times = 0; times < 2; times++) { /* and it stays */
            assert_int_equal(tms_copier_wait(&copier, &second, &error), TMS_BACKUP_IO);
            assert_string_equal(error.call, "pwrite");
            assert_int_equal(error.os_error, ENOSPC);
            assert_string_equal(error.tag, "first");
            assert_non_null(strstr(error.message, backups[0].file->path));
        }
        assert_int_equal(tms_backup_save(&backups[1], &copier, address, &second, &error), TMS_BACKUP_IO);
        assert_string_equal(error.tag, "first");
        tms_copier_close(&copier);
        assert_int_equal(count_descriptors(), descriptors);
        assert_false(backups[0].saved);
        reset_faults();
        for (int i = 0; i < 2; i++) tms_backup_destroy(&backups[i], &f->saver.stores);
    }
}

static void a_disk_that_refuses_all_writes_is_an_error(void **state) {
    fixture_t *f = *state;
    uint64_t address = allocate_filled(f, 9);
    FOR_EACH_WAY(way) {
        tms_error_t error;
        tms_copier_t copier;
        tms_backup_t backup = prepared(f, BYTES);
        set_way(f, way);
        fault.write_error = EIO;
        fault.bad_descriptor = way == BY_URING; /* so that the kernel's attempt fails as well */
        clear_calls();
        open_copier(f, &copier, NULL);
        tms_status_t status = tms_backup_save(&backup, &copier, address, &CONTEXT, &error);
        if (status == TMS_OK) status = tms_copier_wait(&copier, &CONTEXT, &error);
        assert_int_equal(status, TMS_BACKUP_IO);
        assert_int_equal(error.os_error, EIO);
        assert_string_equal(error.call, "pwrite");
        tms_copier_close(&copier);
        assert_nothing_held();
        reset_faults();
        save_one(f, &backup, address); /* the file is as good as before */
        assert_loads(f, &backup, address, 9);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

static void a_file_that_is_replaced_is_not_written_to(void **state) {
    fixture_t *f = *state;
    uint64_t address = allocate_filled(f, 10);
    FOR_EACH_WAY(way) {
        tms_error_t error;
        tms_copier_t copier;
        char kept[2 * PATH_BYTES];
        struct stat found;
        tms_backup_t backup = prepared(f, BYTES);
        set_way(f, way);
        snprintf(kept, sizeof kept, "%s.kept", backup.file->path);
        assert_int_equal(rename(backup.file->path, kept), 0);
        int other = open(backup.file->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        close(other);
        open_copier(f, &copier, NULL);
        assert_int_equal(tms_backup_save(&backup, &copier, address, &CONTEXT, &error), TMS_BACKUP_IO);
        assert_int_equal(error.os_error, ESTALE);
        tms_copier_close(&copier);
        assert_int_equal(stat(backup.file->path, &found), 0);
        assert_int_equal(found.st_size, 0);
        assert_int_equal(rename(kept, backup.file->path), 0);
        save_one(f, &backup, address);
        assert_loads(f, &backup, address, 10);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

/* Each call of the driver that a copy makes fails once. */
static void what_the_driver_refuses_is_an_error_and_leaves_nothing(void **state) {
    fixture_t *f = *state;
    static const struct {
        const char *call;
        bool saving, loading;
    } points[] = {{"cuMemcpyDtoHAsync", true, false},
                  {"cuMemcpyHtoDAsync", false, true},
                  {"cuEventCreate", true, true},
                  {"cuEventRecord", true, true},
                  {"cuEventSynchronize", true, true}};
    uint64_t address = allocate_filled(f, 11);
    tms_backup_t backup = prepared(f, BYTES);
    save_one(f, &backup, address);
    int descriptors = count_descriptors();
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        for (int loading = 0; loading < 2; loading++) {
            if (!(loading ? points[i].loading : points[i].saving)) continue;
            for (uint64_t after = 0; after < PIECES; after++) {
                tms_error_t error;
                tms_copier_t copier;
                if (!loading) plan(f, &backup);
                open_copier(f, &copier, NULL);
                clear_calls();
                simulator()->fail_after(points[i].call, after, 1, CUDA_ERROR_OPERATING_SYSTEM);
                tms_status_t status = loading ? tms_backup_load(&backup, &copier, address, &CONTEXT, &error)
                                              : tms_backup_save(&backup, &copier, address, &CONTEXT, &error);
                if (status == TMS_OK) status = tms_copier_wait(&copier, &CONTEXT, &error);
                assert_int_equal(status, TMS_DRIVER);
                assert_string_equal(error.call, points[i].call);
                assert_string_equal(error.tag, "first");
                tms_copier_close(&copier);
                assert_null(ring_entries());
                assert_int_equal(count_descriptors(), descriptors);
                save_one(f, &backup, address);
            }
        }
    }
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* As under a limit of locked memory. */
static void what_cannot_be_page_locked_serves_as_it_is(void **state) {
    fixture_t *f = *state;
    char logged[TEXT_BYTES];
    tms_sim_usage_t usage;
    uint64_t address = allocate_filled(f, 12);
    tms_backup_t backup = prepared(f, BYTES);
    for (int i = 0; i < 2; i++) {
        clear_calls();
        simulator()->fail_after("cuMemHostRegister", 0, NEVER, i ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_OUT_OF_MEMORY);
        captured_stderr_t captured = capture_begin();
        save_one(f, &backup, address);
        assert_loads(f, &backup, address, 12);
        capture_end(captured, logged, sizeof logged);
        assert_logged(logged, i == 0, "cuMemHostRegister"); /* once is enough */
        assert_true(simulator()->calls("cuMemHostRegister") > 0);
        assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
        simulator()->fail_after("cuMemHostRegister", 0, 0, 0);
    }
    simulator()->usage(0, &usage);
    assert_int_equal(usage.host_bytes, 0);
    tms_backup_destroy(&backup, &f->saver.stores);
}

static void without_memory_there_is_no_copy(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    uint64_t address = allocate_filled(f, 12);
    tms_backup_t backup = prepared(f, BYTES);
    open_copier(f, &copier, NULL);
    clear_calls();
    fault.maps_after = 0;
    assert_int_equal(tms_backup_save(&backup, &copier, address, &CONTEXT, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_string_equal(error.call, "mmap");
    assert_non_null(strstr(error.message, "TMS_DISK_BACKUP_CHUNK_MB"));
    tms_copier_close(&copier);
    assert_nothing_held();
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* What the kernel has when a copier is closed still comes and goes: the memory must not go before it. */
static void closing_waits_for_what_the_kernel_has(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    const uint64_t bytes = 4 * BUFFER; /* all of it is with the kernel, and nothing is waited for */
    int ends[2], left = 0;
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 15);
    tms_backup_t backup = prepared(f, bytes);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    open_copier(f, &copier, NULL);
    clear_calls();
    fault.pipe_end = ends[0];
    fault.release = ends[1];
    ASSERT_OK(tms_backup_save(&backup, &copier, address, &CONTEXT, &error), error);
    int submits = calls.submits;
    assert_true(submits > 0);
    assert_int_equal(calls.waits, 0);
    tms_copier_close(&copier);
    assert_true(calls.waits > 0);
    assert_int_equal(ioctl(ends[0], FIONREAD, &left), 0);
    assert_int_equal(left, IN_FLIGHT_MOST - submits); /* each has taken its byte */
    assert_nothing_held();
    close(ends[0]);
    close(ends[1]);
    reset_faults();
    save_one(f, &backup, address);
    assert_loads(f, &backup, address, 15);
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* The ring grows no further, and the copies go on. */
static void a_ring_that_cannot_grow_is_a_small_one(void **state) {
    fixture_t *f = *state;
    enum { SMALL = 20 };
    tms_error_t error;
    tms_copier_t copier;
    tms_backup_t backups[SMALL];
    char logged[TEXT_BYTES];
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BUFFER);
    fill(address, BUFFER, 13);
    for (int i = 0; i < SMALL; i++) backups[i] = prepared(f, BUFFER);
    for (int after = 1; after < 4; after++) {
        open_copier(f, &copier, NULL);
        clear_calls();
        fault.maps_after = after;
        captured_stderr_t captured = capture_begin();
        for (int i = 0; i < SMALL; i++) ASSERT_OK(tms_backup_save(&backups[i], &copier, address, &CONTEXT, &error), error);
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        capture_end(captured, logged, sizeof logged);
        assert_logged(logged, 1, "mmap failed");
        assert_int_equal(calls.maps, after);
        fault.maps_after = NEVER;
        tms_copier_close(&copier);
    }
    for (int i = 0; i < SMALL; i++) {
        tms_backup_commit(&backups[i], &f->saver.stores);
        assert_loads(f, &backups[i], address, 13);
        tms_backup_destroy(&backups[i], &f->saver.stores);
    }
}

/* What the driver does not take back waits in the quarantine, and goes. */
static void buffers_and_events_that_are_not_taken_back_wait(void **state) {
    fixture_t *f = *state;
    static const struct {
        const char *call;
        tms_quarantine_kind_t kind;
    } points[] = {{"cuEventDestroy", TMS_QUARANTINE_OTHER}, {"cuMemHostUnregister", TMS_QUARANTINE_HOST}};
    uint64_t address = allocate_filled(f, 14);
    tms_backup_t backup = prepared(f, BYTES);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        tms_sim_usage_t usage;
        simulator()->fail_after(points[i].call, 0, 1, CUDA_ERROR_UNKNOWN);
        save_one(f, &backup, address);
        assert_int_equal(tms_quarantine_held(&f->saver.quarantine, points[i].kind), 1);
        assert_null(ring_entries());
        tms_saver_reclaim(&f->saver);
        settle_host_memory(&f->saver);
        assert_true(tms_quarantine_is_empty(&f->saver.quarantine));
        simulator()->usage(0, &usage);
        assert_int_equal(usage.host_bytes, 0);
    }
    assert_loads(f, &backup, address, 14);
    tms_backup_destroy(&backup, &f->saver.stores);
}

#define COPIES(test) cmocka_unit_test_setup_teardown(test, setup_disk_copies, teardown_disk_copies)

int main(void) {
    const struct CMUnitTest tests[] = {
        COPIES(without_io_uring_there_are_threads),
        COPIES(what_io_uring_refuses_goes_to_threads),
        COPIES(a_wait_that_fails_is_no_failure),
        COPIES(short_and_failed_completions_are_made_up_for),
        COPIES(as_many_threads_as_there_are),
        COPIES(where_direct_io_is_refused_the_page_cache_is_used),
        COPIES(a_refusal_by_io_uring_is_noticed),
        COPIES(memory_that_is_not_aligned_goes_through_the_page_cache),
        COPIES(a_write_that_fails_later_is_told_with_its_own_backup),
        COPIES(a_disk_that_refuses_all_writes_is_an_error),
        COPIES(a_file_that_is_replaced_is_not_written_to),
        COPIES(what_the_driver_refuses_is_an_error_and_leaves_nothing),
        COPIES(what_cannot_be_page_locked_serves_as_it_is),
        COPIES(without_memory_there_is_no_copy),
        COPIES(closing_waits_for_what_the_kernel_has),
        COPIES(a_ring_that_cannot_grow_is_a_small_one),
        COPIES(buffers_and_events_that_are_not_taken_back_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
