/* Guards what a fault does to a whole pause or resume: states and device memory stay, and the failed call succeeds once the
 * cause is gone. The faults are backup files that are changed, missing or replaced, a full disk, a driver that returns an
 * invalid granularity, and a free of addresses that are not managed. backup/disk/test_tampering.c and test_system_failures.c
 * have each fault of a file by itself, and python/core/test_core_faults.py has the exceptions of Python. */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "temporary.h"

enum { PATH_BYTES = 512 };
static const tms_error_context_t CONTEXT = {.operation = "test", .device = 0};
static const uint64_t BYTES = 5 * MIB + 33;
static int fallocate_error;
static char base[TEMPORARY_BYTES], directory[TEMPORARY_BYTES + 8];

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    if (fallocate_error == 0) return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    errno = fallocate_error;
    return -1;
}

/* ---- the driver ---- */

static size_t reported_granularity;
static bool is_lying;

static CUresult tell_granularity(size_t *granularity, const CUmemAllocationProp *properties,
                                 CUmemAllocationGranularity_flags option) {
    (void)properties, (void)option;
    *granularity = is_lying ? reported_granularity : TMS_SIM_GRANULARITY;
    return CUDA_SUCCESS;
}

/* Devices behind a driver that answers one query with a given value. */
static void an_invalid_granularity_is_refused(void **state) {
    fixture_t *f = *state;
    static const size_t nonsense[] = {0, 1, 3, 512, 2048, 3 * 1024 * 1024, SIZE_MAX, (size_t)1 << 63, (size_t)1 << 40};
    tms_driver_table_t lying = *f->cuda;
    tms_driver_t driver;
    tms_devices_t devices;
    lying.cuMemGetAllocationGranularity = tell_granularity;
    tms_driver_init(&driver, f->config.driver_path, &f->log);
    atomic_store(&driver.table, &lying);
    tms_devices_init(&devices, &driver);
    is_lying = true;
    for (size_t i = 0; i < sizeof nonsense / sizeof *nonsense; i++) {
        char number[32];
        tms_error_t error;
        const tms_device_table_t *table = NULL;
        reported_granularity = nonsense[i];
        snprintf(number, sizeof number, "%zu bytes", reported_granularity);
        assert_int_equal(tms_devices_load(&devices, NULL, &table, &CONTEXT, &error), TMS_DRIVER);
        assert_null(table);
        assert_int_equal(error.device, 0);
        assert_non_null(strstr(error.message, "cuMemGetAllocationGranularity"));
        assert_non_null(strstr(error.message, number));
    }
    tms_error_t error;
    const tms_device_table_t *table = NULL;
    is_lying = false;
    ASSERT_OK(tms_devices_load(&devices, NULL, &table, &CONTEXT, &error), error);
    assert_int_equal(table->device[0].granularity, TMS_SIM_GRANULARITY);
    tms_devices_release(&devices);
}

/* ---- addresses ---- */

static void assert_no_free(fixture_t *f, uint64_t address, tms_status_t status, const char *text) {
    tms_error_t error;
    tms_stats_t before = f->saver.stats;
    assert_int_equal(tms_free_address(&f->saver, address, &error), status);
    assert_int_equal(error.status, status);
    if (!strstr(error.message, text)) fail_msg("'%s' does not say '%s'", error.message, text);
    assert_memory_equal(&before, &f->saver.stats, sizeof before);
}

static void only_our_addresses_are_freed_and_only_once(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t kept = allocate(f, "a", TMS_BACKUP_MMAP, 3 * MIB), gone = allocate(f, "b", TMS_BACKUP_NONE, MIB);
    uint64_t reserved = 4 * MIB;
    int local = 0;
    fill(kept, 3 * MIB, 1);
    ASSERT_OK(tms_free_address(&f->saver, gone, &error), error);
    for (int paused = 0; paused < 2; paused++) {
        simulator()->clear_counts();
        assert_no_free(f, gone, TMS_NOT_MANAGED, "");              /* twice */
        assert_no_free(f, (uintptr_t)&local, TMS_NOT_MANAGED, ""); /* of the host */
        assert_no_free(f, 1, TMS_NOT_MANAGED, "");                 /* not managed */
        assert_no_free(f, UINT64_MAX, TMS_NOT_MANAGED, "");
        assert_no_free(f, kept - 1, TMS_NOT_MANAGED, "");
        assert_no_free(f, kept + reserved, TMS_NOT_MANAGED, "");
        assert_no_free(f, kept + 1, TMS_INVALID_ARGUMENT, "lies inside an allocation that starts at");
        assert_no_free(f, kept + reserved - 1, TMS_INVALID_ARGUMENT, "lies inside an allocation that starts at");
        assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
        assert_int_equal(simulator()->calls("cuMemAddressFree"), 0);
        assert_int_equal(state_of(f, kept), paused ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_ACTIVE);
        if (!paused) ASSERT_OK(pause_all(f, &error), error);
    }
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(kept, 3 * MIB, 1);
}

/* ---- the disk ---- */

static int setup_disk(void **state) {
    tms_error_t error;
    fallocate_error = 0;
    if (!make_temporary_directory(base, "hostile") || setup_one_device(state) != 0) return -1;
    fixture_t *f = *state;
    snprintf(directory, sizeof directory, "%s/d", base);
    f->saver.stores.disk.staging_bytes = 8 * MIB;
    tms_log_init(&f->log, TMS_LOG_SILENT);
    return tms_disk_set_directory(&f->saver.stores.disk, directory, &error) == TMS_OK ? 0 : -1;
}

static void run(const char *format, const char *path, const char *other) {
    char command[4 * PATH_BYTES];
    snprintf(command, sizeof command, format, path, other);
    assert_int_equal(system(command), 0);
}

static int teardown_disk(void **state) {
    fixture_t *f = *state;
    while (f->saver.registry.first) (void)tms_free_address(&f->saver, f->saver.registry.first->begin, NULL);
    assert_int_equal(atomic_load(&f->saver.stores.disk.total), 0);
    int result = teardown(state);
    return remove_temporary_directory(base) == 0 ? result : -1;
}

static const char *file_of(fixture_t *f, uint64_t address) {
    return disk_file_of(f, &tms_segment_of(tms_registry_find(&f->saver.registry, address))->backup)->path;
}

static uint64_t allocate_filled(fixture_t *f, const char *tag, tms_backup_kind_t backup, uint32_t seed) {
    uint64_t address = allocate(f, tag, backup, BYTES);
    fill(address, BYTES, seed);
    return address;
}

static void assert_resume_refused(fixture_t *f, uint64_t address, int os_error, const char *text) {
    tms_error_t error;
    uint64_t physical = physical_bytes(0);
    assert_int_equal(resume_all(f, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, os_error);
    assert_int_equal(error.device, 0);
    assert_string_equal(error.operation, "resume");
    assert_string_equal(error.tag, "disk");
    if (!strstr(error.message, text)) fail_msg("'%s' does not say '%s'", error.message, text);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    assert_int_equal(physical_bytes(0), physical);
}

/* Adds one to a byte of a file. */
static void change_byte(const char *path, off_t offset, int by) {
    char byte = 0;
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, &byte, 1, offset), 1);
    byte = (char)(byte + by);
    assert_int_equal(pwrite(fd, &byte, 1, offset), 1);
    close(fd);
}

static void a_changed_backup_never_reaches_the_device(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t pinned = allocate_filled(f, "pinned", TMS_BACKUP_PINNED, 1);
    uint64_t address = allocate_filled(f, "disk", TMS_BACKUP_DISK, 2);
    static const off_t places[] = {0, 2 * MIB, 5 * MIB + 32};
    ASSERT_OK(pause_all(f, &error), error);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        change_byte(file_of(f, address), places[i], 1);
        simulator()->clear_counts();
        assert_resume_refused(f, address, 0, "was changed or truncated");
        /* The pinned memory, and the blocks before the one with the change. */
        assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 1 + (uint64_t)places[i] / TMS_DISK_BLOCK_BYTES);
        assert_int_equal(state_of(f, pinned), TMS_SEGMENT_PAUSED);
        change_byte(file_of(f, address), places[i], -1);
    }
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(pinned, BYTES, 1);
    assert_filled(address, BYTES, 2);
}

static void a_truncated_backup_stays_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char copy[2 * PATH_BYTES];
    uint64_t address = allocate_filled(f, "disk", TMS_BACKUP_DISK, 3),
             other = allocate_filled(f, "mmap", TMS_BACKUP_MMAP, 4);
    ASSERT_OK(pause_all(f, &error), error);
    snprintf(copy, sizeof copy, "%s/copy", base);
    run("cp '%s' '%s'", file_of(f, address), copy);
    assert_int_equal(truncate(file_of(f, address), 4 * MIB), 0);
    assert_resume_refused(f, address, 0, "was changed or truncated");
    ASSERT_OK(resume_tag(f, "mmap", &error), error); /* the rest of the job can continue */
    assert_filled(other, BYTES, 4);
    run("cat '%s' > '%s'", copy, file_of(f, address));
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, BYTES, 3);
}

static void files_missing_while_paused_are_an_error_until_restored(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char moved[2 * PATH_BYTES];
    uint64_t address = allocate_filled(f, "disk", TMS_BACKUP_DISK, 5);
    ASSERT_OK(pause_all(f, &error), error);
    snprintf(moved, sizeof moved, "%s/moved", base);
    assert_int_equal(rename(file_of(f, address), moved), 0);
    assert_resume_refused(f, address, ENOENT, file_of(f, address));
    assert_int_equal(rename(moved, file_of(f, address)), 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, BYTES, 5);

    ASSERT_OK(pause_all(f, &error), error);
    run("rm -rf '%s'%s", directory, "");
    assert_resume_refused(f, address, ENOENT, file_of(f, address));
    ASSERT_OK(tms_free_address(&f->saver, address, &error), error); /* lost, but nothing else is */
}

static void a_directory_removed_between_two_pauses_is_recreated(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_filled(f, "disk", TMS_BACKUP_DISK, 6);
    for (int round = 0; round < 4; round++) {
        ASSERT_OK(pause_all(f, &error), error);
        assert_int_equal(atomic_load(&f->saver.stores.disk.total), BYTES);
        ASSERT_OK(resume_all(f, &error), error);
        assert_filled(address, BYTES, 6);
        if (round == 0) run("rm -rf '%s'%s", directory, "");
        if (round == 1) assert_int_equal(unlink(file_of(f, address)), 0);
        if (round == 2) assert_int_equal(truncate(file_of(f, address), 1), 0);
    }
}

static void a_file_that_replaced_a_backup_is_left_alone(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char path[2 * PATH_BYTES];
    uint64_t address = allocate_filled(f, "disk", TMS_BACKUP_DISK, 7);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    snprintf(path, sizeof path, "%s", file_of(f, address));
    run("mv '%s' '%s/moved'", path, base); /* keeps its inode number from being reused */
    run("echo precious > '%s'%s", path, "");
    ASSERT_OK(pause_all(f, &error), error);
    assert_string_not_equal(file_of(f, address), path);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, BYTES, 7);
    run("test \"$(cat '%s')\" = precious%s", path, "");
    ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    run("test \"$(cat '%s')\" = precious%s", path, "");
}

static void a_full_disk_leaves_everything_active(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_filled(f, "disk", TMS_BACKUP_DISK, 8), other = allocate_filled(f, "a", TMS_BACKUP_MMAP, 9);
    uint64_t physical = physical_bytes(0);
    fallocate_error = ENOSPC;
    assert_int_equal(pause_all(f, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOSPC);
    assert_string_equal(error.operation, "pause");
    assert_string_equal(error.tag, "disk");
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, other), TMS_SEGMENT_ACTIVE);
    assert_int_equal(physical_bytes(0), physical);
    assert_int_equal(atomic_load(&f->saver.stores.disk.total), 0);
    assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes), 0);
    fallocate_error = 0;
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(physical_bytes(0), 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, BYTES, 8);
    assert_filled(other, BYTES, 9);
}

#define ONE(test)  cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define DISK(test) cmocka_unit_test_setup_teardown(test, setup_disk, teardown_disk)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(an_invalid_granularity_is_refused),
        ONE(only_our_addresses_are_freed_and_only_once),
        DISK(a_changed_backup_never_reaches_the_device),
        DISK(a_truncated_backup_stays_paused),
        DISK(files_missing_while_paused_are_an_error_until_restored),
        DISK(a_directory_removed_between_two_pauses_is_recreated),
        DISK(a_file_that_replaced_a_backup_is_left_alone),
        DISK(a_full_disk_leaves_everything_active),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
