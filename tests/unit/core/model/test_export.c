/* Guards the export of physical memory: one descriptor for each piece of memory, which ends with it, and importers that keep
 * what they have mapped. */

#include "support.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "core/model/export.h"

/* An import of a descriptor in this process, as a stand-in for another one. */
typedef struct imported {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    uint64_t bytes;
} imported_t;

static imported_t import(fixture_t *f, int descriptor, uint64_t bytes) {
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    imported_t imported = {.bytes = bytes};
    CUresult (*open)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    void *library = dlopen(getenv("TMS_CUDA_DRIVER"), RTLD_NOW | RTLD_LOCAL);
    void *address = dlsym(library, "cuMemImportFromShareableHandle");
    memcpy(&open, &address, sizeof open);
    assert_int_equal(open(&imported.handle, (void *)(intptr_t)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), 0);
    assert_int_equal(f->cuda->cuMemAddressReserve(&imported.address, bytes, 0, 0, 0), 0);
    assert_int_equal(f->cuda->cuMemMap(imported.address, bytes, 0, imported.handle, 0), 0);
    assert_int_equal(f->cuda->cuMemSetAccess(imported.address, bytes, &access, 1), 0);
    dlclose(library);
    return imported;
}

static void drop(fixture_t *f, imported_t imported) {
    assert_int_equal(f->cuda->cuMemUnmap(imported.address, imported.bytes), 0);
    assert_int_equal(f->cuda->cuMemRelease(imported.handle), 0);
    assert_int_equal(f->cuda->cuMemAddressFree(imported.address, imported.bytes), 0);
}

static bool is_open(int descriptor) { return fcntl(descriptor, F_GETFD) >= 0; }

static tms_export_t export(fixture_t *f, uint64_t address) {
    tms_export_t exported = {.descriptor = -1};
    tms_error_t error;
    ASSERT_OK(tms_export_memory(&f->saver, address, &exported, &error), error);
    return exported;
}

static void memory_is_exported_once(void **state) {
    fixture_t *f = *state;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 3 * MIB);
    tms_export_t first = export(f, address + MIB);
    assert_int_equal(first.address, address);
    assert_int_equal(first.bytes, 4 * MIB);
    assert_int_equal(first.device, 0);
    assert_int_equal(fcntl(first.descriptor, F_GETFD), FD_CLOEXEC);
    simulator()->clear_counts();
    tms_export_t again = export(f, address);
    assert_memory_equal(&first, &again, sizeof first);
    assert_int_equal(simulator()->calls("cuMemExportToShareableHandle"), 0);

    uint64_t other = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    tms_export_t another = export(f, other);
    assert_int_not_equal(another.descriptor, first.descriptor);
    assert_int_not_equal(another.generation, first.generation);
    assert_int_equal(tms_free_address(&f->saver, address, NULL), TMS_OK);
    assert_false(is_open(first.descriptor));
    assert_true(is_open(another.descriptor));
    assert_int_equal(physical_bytes(0), 2 * MIB);
}

static void an_importer_keeps_what_was_shared(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_PINNED, 4 * MIB);
    fill(address, 4 * MIB, 1);
    tms_export_t first = export(f, address);
    imported_t imported = import(f, first.descriptor, first.bytes);
    assert_filled(imported.address, 4 * MIB, 1);
    fill(imported.address, 4 * MIB, 2);
    assert_filled(address, 4 * MIB, 2); /* the same memory */

    ASSERT_OK(pause_all(f, &error), error);
    assert_false(is_open(first.descriptor));
    assert_int_equal(physical_bytes(0), 4 * MIB); /* the importer's */
    assert_filled(imported.address, 4 * MIB, 2);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(physical_bytes(0), 8 * MIB);
    fill(address, 4 * MIB, 3);
    assert_filled(imported.address, 4 * MIB, 2);

    tms_export_t second = export(f, address);
    assert_int_not_equal(second.generation, first.generation);
    assert_int_not_equal(second.descriptor, first.descriptor);
    imported_t again = import(f, second.descriptor, second.bytes);
    assert_filled(again.address, 4 * MIB, 3);
    drop(f, imported);
    drop(f, again);
    assert_int_equal(physical_bytes(0), 4 * MIB);
}

static void a_cycle_makes_the_same_calls_with_and_without(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char without[512], with[512];
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    for (int cycle = 0; cycle < 2; cycle++) {
        if (cycle == 1) (void)export(f, address);
        simulator()->trace(ON);
        simulator()->clear_counts();
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_all(f, &error), error);
        simulator()->read_trace(cycle == 0 ? without : with, sizeof with);
        simulator()->trace(OFF);
    }
    assert_non_null(strstr(without, "cuMemUnmap"));
    assert_string_equal(without, with);
}

static void memory_that_is_not_resident_is_refused(void **state) {
    fixture_t *f = *state;
    tms_export_t exported = {.descriptor = 77};
    tms_error_t error;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_export_memory(&f->saver, 77, &exported, &error), TMS_NOT_MANAGED);

    CUstream stream = launch_behind_gate(f, 1, address);
    held_pause_t held;
    begin_pause(&held, f, "weights");
    assert_int_equal(tms_export_memory(&f->saver, address, &exported, &error), TMS_INVALID_STATE);
    assert_non_null(strstr(error.message, "this memory is being paused, resumed or repaired"));
    simulator()->open_gate(1);
    join_pause(&held);
    destroy_stream(f, stream);

    assert_int_equal(tms_export_memory(&f->saver, address, &exported, &error), TMS_INVALID_STATE);
    assert_non_null(strstr(error.message, "this memory is paused. Share it after its resume"));
    assert_non_null(strstr(error.message, "tag 'weights'"));
    assert_int_equal(exported.descriptor, 77);
}

static void memory_that_stays_damaged_is_refused(void **state) {
    fixture_t *f = *state;
    tms_export_t exported;
    tms_error_t error;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    int descriptor = export(f, address).descriptor;
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_DAMAGED);
    assert_false(is_open(descriptor)); /* the pause was committed */
    assert_int_equal(tms_export_memory(&f->saver, address, &exported, &error), TMS_INVALID_STATE);
    assert_non_null(strstr(error.message, "this memory is damaged"));
    tms_reclaim_all(&f->saver);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
}

static void a_pause_that_is_undone_keeps_the_descriptor(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_PINNED, 2 * MIB);
    tms_export_t before = export(f, address);
    simulator()->fail_after("cuMemcpyDtoHAsync_v2", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    tms_export_t after = export(f, address);
    assert_memory_equal(&before, &after, sizeof before);
    assert_true(is_open(before.descriptor));
}

static void a_failed_export_leaves_nothing(void **state) {
    fixture_t *f = *state;
    tms_export_t exported = {.descriptor = 77};
    tms_error_t error;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuMemExportToShareableHandle", 0, 1, CUDA_ERROR_OPERATING_SYSTEM);
    assert_int_equal(tms_export_memory(&f->saver, address, &exported, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemExportToShareableHandle");
    assert_int_equal(exported.descriptor, 77);
    for (size_t i = 0; i < sizeof f->saver.descriptors.open / sizeof(uint64_t); i++)
        assert_true(f->saver.descriptors.open[i] == 0);
    assert_true(is_open(export(f, address).descriptor));
}

static void a_device_that_cannot_export_is_named(void **state) {
    fixture_t *f = *state;
    tms_device_table_t devices = *f->topology;
    tms_export_t exported;
    tms_error_t error;
    devices.device[0].exportable = false;
    atomic_store(&f->devices.table, &devices);
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_export_memory(&f->saver, address, &exported, &error), TMS_INVALID_STATE);
    assert_non_null(strstr(error.message, "cannot export this device's memory as a file descriptor"));
    assert_non_null(strstr(error.message, "tensor.cpu()"));
    assert_int_equal(simulator()->calls("cuMemExportToShareableHandle"), 0);
    atomic_store(&f->devices.table, f->topology);
}

static void a_forked_child_exports_nothing(void **state) {
    fixture_t *f = *state;
    tms_export_t exported;
    tms_error_t error;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    atomic_store(&f->saver.forked, true);
    assert_int_equal(tms_export_memory(&f->saver, address, &exported, &error), TMS_FORKED);
    atomic_store(&f->saver.forked, false);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(memory_is_exported_once, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(an_importer_keeps_what_was_shared, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_cycle_makes_the_same_calls_with_and_without, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(memory_that_is_not_resident_is_refused, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(memory_that_stays_damaged_is_refused, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_pause_that_is_undone_keeps_the_descriptor, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_failed_export_leaves_nothing, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_device_that_cannot_export_is_named, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_forked_child_exports_nothing, setup_one_device, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
