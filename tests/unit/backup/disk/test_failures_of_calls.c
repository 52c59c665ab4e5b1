/* Guards backup/disk/copy.c against failing calls of the system and the driver: a copy that cannot be made is an error that
 * names the call, and nothing leaks. */
#include "support/disk_failures_fixture.h"

/* ---- errors ---- */

/* A later call reports a failed write, with the backup that it belongs to. */
static void a_later_write_failure_names_its_own_backup(void **state) {
    fixture_t *f = *state;
    const tms_error_context_t second = {.operation = "pause", .device = 0, .tag = "second"};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BUFFER);
    FOR_EACH_WAY(way) {
        if (way == BY_URING) continue; /* its failed writes are retried by pwrite: below */
        tms_error_t error;
        tms_copier_t copier;
        tms_backup_t backups[] = {prepared(f, BUFFER), prepared(f, BUFFER)};
        int descriptors = count_descriptors();
        set_way(f, way);
        fault.write_error = ENOSPC;
        open_copier(f, &copier, NULL);
        ASSERT_OK(tms_backup_save(&backups[0], &f->saver.stores, &copier, address, &CONTEXT, &error), error);
        ASSERT_OK(tms_backup_save(&backups[1], &f->saver.stores, &copier, address, &second, &error), error);
        for (int times = 0; times < 2; times++) { /* and it stays */
            assert_int_equal(tms_copier_wait(&copier, &second, &error), TMS_BACKUP_IO);
            assert_string_equal(error.call, "pwrite");
            assert_int_equal(error.os_error, ENOSPC);
            assert_string_equal(error.tag, "first");
            assert_non_null(strstr(error.message, disk_file_of(f, &backups[0])->path));
        }
        assert_int_equal(tms_backup_save(&backups[1], &f->saver.stores, &copier, address, &second, &error), TMS_BACKUP_IO);
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
        tms_status_t status = tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error);
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

static void a_replaced_file_is_not_written(void **state) {
    fixture_t *f = *state;
    uint64_t address = allocate_filled(f, 10);
    FOR_EACH_WAY(way) {
        tms_error_t error;
        tms_copier_t copier;
        char kept[2 * PATH_BYTES];
        struct stat found;
        tms_backup_t backup = prepared(f, BYTES);
        set_way(f, way);
        snprintf(kept, sizeof kept, "%s.kept", disk_file_of(f, &backup)->path);
        assert_int_equal(rename(disk_file_of(f, &backup)->path, kept), 0);
        int other = open(disk_file_of(f, &backup)->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        close(other);
        open_copier(f, &copier, NULL);
        assert_int_equal(tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), TMS_BACKUP_IO);
        assert_int_equal(error.os_error, ESTALE);
        tms_copier_close(&copier);
        assert_int_equal(stat(disk_file_of(f, &backup)->path, &found), 0);
        assert_int_equal(found.st_size, 0);
        assert_int_equal(rename(kept, disk_file_of(f, &backup)->path), 0);
        save_one(f, &backup, address);
        assert_loads(f, &backup, address, 10);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

/* Each call of the driver that a copy makes fails once. */
static void a_failed_driver_call_is_an_error_and_leaves_nothing(void **state) {
    fixture_t *f = *state;
    static const struct {
        const char *call;
        bool saving, loading;
    } points[] = {{"cuMemcpyDtoHAsync", .saving = true},
                  {"cuMemcpyHtoDAsync", .loading = true},
                  {"cuEventCreate", .saving = true, .loading = true},
                  {"cuEventRecord", .saving = true, .loading = true},
                  {"cuEventSynchronize", .saving = true, .loading = true}};
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
                tms_status_t status = loading
                                          ? tms_backup_load(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error)
                                          : tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error);
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

/* As with a limit on pinned memory. */
static void memory_that_cannot_be_pinned_is_used_unpinned(void **state) {
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

static void a_copy_without_memory_fails(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    uint64_t address = allocate_filled(f, 12);
    tms_backup_t backup = prepared(f, BYTES);
    open_copier(f, &copier, NULL);
    clear_calls();
    fault.maps_after = 0;
    assert_int_equal(tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_string_equal(error.call, "mmap");
    assert_non_null(strstr(error.message, "TMS_DISK_BACKUP_CHUNK_MB"));
    tms_copier_close(&copier);
    assert_nothing_held();
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* Requests in flight when a copier is closed still complete: their memory must outlive them. */
static void closing_waits_for_requests_in_flight(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    const uint64_t bytes = 4 * BUFFER; /* the kernel has all requests, and none has been waited for */
    int ends[2], left = 0;
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate_filled(f, 15);
    tms_backup_t backup = prepared(f, bytes);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    open_copier(f, &copier, NULL);
    clear_calls();
    fault.pipe_end = ends[0];
    fault.release = ends[1];
    ASSERT_OK(tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
    int submits = calls.submits;
    assert_true(submits > 0);
    assert_int_equal(calls.waits, 0);
    tms_copier_close(&copier);
    assert_true(calls.waits > 0);
    assert_int_equal(ioctl(ends[0], FIONREAD, &left), 0);
    assert_int_equal(left, MAX_IN_FLIGHT - submits); /* each has read its byte */
    assert_nothing_held();
    close(ends[0]);
    close(ends[1]);
    reset_faults();
    save_one(f, &backup, address);
    assert_loads(f, &backup, address, 15);
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* The ring grows no further, and the copies continue. */
static void a_ring_that_cannot_grow_stays_small(void **state) {
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
        for (int i = 0; i < SMALL; i++)
            ASSERT_OK(tms_backup_save(&backups[i], &f->saver.stores, &copier, address, &CONTEXT, &error), error);
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

/* Resources that the driver does not release are quarantined, and released later. */
static void buffers_and_events_that_cannot_be_released_are_quarantined(void **state) {
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
        tms_reclaim_all(&f->saver);
        settle_host_memory(&f->saver);
        assert_true(tms_quarantine_is_empty(&f->saver.quarantine));
        simulator()->usage(0, &usage);
        assert_int_equal(usage.host_bytes, 0);
    }
    assert_loads(f, &backup, address, 14);
    tms_backup_destroy(&backup, &f->saver.stores);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        COPIES(a_later_write_failure_names_its_own_backup),
        COPIES(a_disk_that_refuses_all_writes_is_an_error),
        COPIES(a_replaced_file_is_not_written),
        COPIES(a_failed_driver_call_is_an_error_and_leaves_nothing),
        COPIES(memory_that_cannot_be_pinned_is_used_unpinned),
        COPIES(a_copy_without_memory_fails),
        COPIES(closing_waits_for_requests_in_flight),
        COPIES(a_ring_that_cannot_grow_stays_small),
        COPIES(buffers_and_events_that_cannot_be_released_are_quarantined),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
