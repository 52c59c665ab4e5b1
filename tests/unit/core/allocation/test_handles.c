/* Guards memory that the program creates, maps, unmaps and releases itself: it is paused and resumed like other memory, and
 * nothing is leaked or unmapped twice. */

#include "support/handles_fixture.h"

/* ---- pause and resume ---- */

static void contents_come_back(void **state) {
    static const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP};
    fixture_t *f = *state;
    tms_error_t error;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        program_t program = reserve(f);
        map_all(&program, kinds[i]);
        const uint64_t before = used();
        ASSERT_OK(pause_all(f, &error), error);
        assert_int_equal(used(), before - PIECES * PIECE_BYTES);
        ASSERT_OK(resume_all(f, &error), error);
        assert_int_equal(used(), before);
        for (int piece = 0; piece < PIECES; piece++) assert_filled(place(&program, piece), PIECE_BYTES, (uint32_t)piece + 1);
        end(&program);
    }
}

/* Neighbours would be unmapped together, and the program unmaps them one by one. */
static void each_handle_stays_one(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_error_t error;
    map_all(&program, TMS_BACKUP_PINNED);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuMemCreate"), PIECES);
    const uint64_t before = used();
    unmap(&program, 1);
    assert_int_equal(used(), before - PIECE_BYTES);
    assert_filled(place(&program, 0), PIECE_BYTES, 1);
    assert_filled(place(&program, 2), PIECE_BYTES, 3);
    end(&program);
}

static void unmapped_while_paused(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_error_t error;
    tms_report_t report;
    map_all(&program, TMS_BACKUP_PINNED);
    ASSERT_OK(pause_all(f, &error), error);
    unmap(&program, 0);
    unmap(&program, 3);
    map(&program, 3, TMS_BACKUP_PINNED);
    fill(place(&program, 3), PIECE_BYTES, 9);
    ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
    assert_int_equal(report.bytes, 2 * PIECE_BYTES);
    assert_filled(place(&program, 1), PIECE_BYTES, 2);
    assert_filled(place(&program, 2), PIECE_BYTES, 3);
    assert_filled(place(&program, 3), PIECE_BYTES, 9);
    end(&program);
}

/* ---- devices ---- */

static struct {
    fixture_t *fixture;
    CUresult (*map)(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags);
    bool scans; /* another thread scans for devices then */
} coming;

static CUresult use_second_device(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                                  unsigned long long flags) {
    fixture_t *f = coming.fixture;
    const tms_error_context_t context = {.operation = "test", .device = 1};
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &context, &error), error);
    tms_devices_leave(&f->devices, 1);
    if (coming.scans) ASSERT_OK(tms_peers_refresh(&f->saver, &error), error);
    return coming.map(address, bytes, offset, handle, flags);
}

static void a_device_that_comes_into_use_during_a_map_gets_access(void **state) {
    for (int scans = 0; scans < 2; scans++) {
        fixture_t f;
        fixture_begin(&f, 2);
        const tms_error_context_t context = {.operation = "test", .device = 0};
        tms_error_t error;
        ASSERT_OK(tms_devices_load(&f.devices, &f.cuda, &f.topology, &context, &error), error);
        ASSERT_OK(tms_devices_enter(&f.devices, 0, &context, &error), error);
        program_t program = reserve(&f);
        const uint64_t number = create(&program, TMS_BACKUP_NONE);
        coming = (__typeof__(coming)){.fixture = &f, .map = f.cuda->cuMemMap, .scans = scans};
        writable(&f)->cuMemMap = use_second_device;
        map_handle(&program, 0, number);
        writable(&f)->cuMemMap = coming.map;
        const tms_segment_t *segment = tms_segment_of(tms_registry_find(&f.saver.registry, program.base));
        assert_int_equal(tms_segment_accessible(segment), 3);
        end(&program);
        tms_devices_leave(&f.devices, 0);
        fixture_end(&f, 2);
    }
    (void)state;
}

/* ---- handles ---- */

static void references_keep_a_handle(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_error_t error;
    CUmemGenericAllocationHandle memory = 0, again = 0;
    uint64_t number = 0;
    map(&program, 0, TMS_BACKUP_PINNED);
    assert_true(tms_handles_retain(&f->saver, place(&program, 0) + 5, &number));
    assert_int_equal(number, program.handles[0]);
    assert_false(tms_handles_retain(&f->saver, place(&program, 1), &number));
    ASSERT_OK(tms_handles_memory(&f->saver, number, &memory, &error), error);
    assert_false(tms_handles_is_ours(memory));
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(tms_handles_memory(&f->saver, number, &again, &error), TMS_INVALID_STATE);
    ASSERT_OK(resume_all(f, &error), error);
    ASSERT_OK(tms_handles_memory(&f->saver, number, &again, &error), error);
    ASSERT_OK(tms_handles_release(&f->saver, number, &error), error);
    unmap(&program, 0);
    assert_int_equal(tms_handles_release(&f->saver, number, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_handles_memory(&f->saver, number, &again, &error), TMS_INVALID_ARGUMENT);
    end(&program);
}

static void a_handle_may_be_released_before_it_is_unmapped(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_error_t error;
    CUmemGenericAllocationHandle memory = 0;
    uint64_t number = 0;
    map(&program, 0, TMS_BACKUP_PINNED);
    ASSERT_OK(tms_handles_release(&f->saver, program.handles[0], &error), error);
    assert_true(tms_handles_retain(&f->saver, place(&program, 0), &number)); /* while it is mapped, it can be had again */
    ASSERT_OK(tms_handles_memory(&f->saver, number, &memory, &error), error);
    ASSERT_OK(tms_handles_release(&f->saver, number, &error), error);
    assert_int_equal(tms_handles_memory(&f->saver, number, &memory, &error), TMS_INVALID_ARGUMENT);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    ASSERT_OK(tms_handles_unmap(&f->saver, place(&program, 0), PIECE_BYTES, &error), error);
    program.handles[0] = 0;
    assert_int_equal(used(), 0);
    end(&program);
}

static void a_handle_that_was_never_mapped_is_released(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_error_t error;
    const uint64_t number = create(&program, TMS_BACKUP_NONE);
    assert_int_equal(used(), PIECE_BYTES);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(used(), PIECE_BYTES);
    ASSERT_OK(tms_handles_release(&f->saver, number, &error), error);
    assert_int_equal(used(), 0);
    end(&program);
}

static void a_part_cannot_be_mapped_or_unmapped(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_saver_t *saver = &f->saver;
    tms_error_t error;
    bool busy = true;
    const uint64_t number = create(&program, TMS_BACKUP_NONE);
    assert_int_equal(tms_handles_map(saver, program.base, PIECE_BYTES / 2, number, &busy, &error), TMS_INVALID_ARGUMENT);
    map_handle(&program, 0, number);
    map(&program, 1, TMS_BACKUP_NONE);
    assert_int_equal(tms_handles_map(saver, place(&program, 2), PIECE_BYTES, number, &busy, &error), TMS_INVALID_STATE);
    assert_false(busy);
    assert_int_equal(tms_handles_unmap(saver, program.base, PIECE_BYTES / 2, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_handles_unmap(saver, program.base, 2 * PIECE_BYTES, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_handles_unmap(saver, place(&program, 3), PIECE_BYTES, &error), TMS_NOT_MANAGED);
    const uint64_t other = create(&program, TMS_BACKUP_NONE);
    assert_int_equal(tms_handles_map(saver, program.base, PIECE_BYTES, other, &busy, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_free_address(saver, program.base, &error), TMS_NOT_MANAGED);
    ASSERT_OK(tms_handles_release(saver, other, &error), error);
    end(&program);
}

static void too_little_memory_is_named(void **state) {
    fixture_t *f = *state;
    const tms_region_settings_t settings = {.managed = true, .tag = "default"};
    tms_region_t region;
    tms_error_t error;
    uint64_t number = 0;
    ASSERT_OK(tms_region_from_settings(&f->regions, &settings, &region, &error), error);
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(tms_handles_create(&f->saver, &region, PIECE_BYTES, 0, &number, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(tms_handles_create(&f->saver, &region, PIECE_BYTES + 1, 0, &number, &error), TMS_INVALID_ARGUMENT);
    atomic_store(&f->saver.memory_margin_bytes, 256 * MIB); /* all that the device has */
    assert_int_equal(tms_handles_create(&f->saver, &region, PIECE_BYTES, 0, &number, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_non_null(strstr(error.message, "memory_margin_bytes"));
    assert_int_equal(used(), 0);
}

/* The driver has failed to release memory, which the next handle needs. */
static void a_handle_gets_memory_that_could_not_be_released(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    map(&program, 0, TMS_BACKUP_NONE);
    simulator()->fail_after("cuMemRelease", 0, 1, CUDA_ERROR_UNKNOWN);
    unmap(&program, 0);
    assert_int_equal(used(), PIECE_BYTES);
    assert_int_equal(simulator()->take_memory(0, (int64_t)(256 * MIB - PIECE_BYTES)), 0);
    map(&program, 0, TMS_BACKUP_NONE);
    assert_int_equal(used(), PIECE_BYTES);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(256 * MIB - PIECE_BYTES)), 0);
    end(&program);
}

static void parts_of_a_range_are_found(void **state) {
    program_t program = reserve(*state);
    tms_saver_t *saver = &program.fixture->saver;
    map(&program, 1, TMS_BACKUP_NONE);
    map(&program, 2, TMS_BACKUP_NONE);
    uint64_t begin = program.base + 5, end_of_it = place(&program, 3);
    assert_true(tms_handles_find(saver, &begin, &end_of_it));
    assert_int_equal(begin, place(&program, 1));
    assert_int_equal(end_of_it, place(&program, 2));
    begin = place(&program, 2) + 7;
    end_of_it = place(&program, 3);
    assert_true(tms_handles_find(saver, &begin, &end_of_it));
    assert_int_equal(begin, place(&program, 2) + 7);
    assert_int_equal(end_of_it, place(&program, 3));
    begin = place(&program, 3);
    assert_false(tms_handles_find(saver, &begin, &end_of_it));
    map(&program, 0, TMS_BACKUP_NONE); /* later than its neighbours */
    map(&program, 3, TMS_BACKUP_NONE);
    for (int first = 0; first < PIECES; first++) {
        for (int last = first; last < PIECES; last++) {
            begin = place(&program, first);
            end_of_it = place(&program, last + 1);
            assert_true(tms_handles_find(saver, &begin, &end_of_it));
            assert_int_equal(begin, place(&program, first));
            assert_int_equal(end_of_it, place(&program, first + 1));
        }
    }
    end(&program);
}

static void a_handle_that_was_unmapped_cannot_be_mapped_again(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_error_t error;
    bool busy = true;
    map(&program, 0, TMS_BACKUP_NONE);
    ASSERT_OK(tms_handles_unmap(&f->saver, program.base, PIECE_BYTES, &error), error);
    assert_int_equal(tms_handles_map(&f->saver, program.base, PIECE_BYTES, program.handles[0], &busy, &error),
                     TMS_INVALID_STATE);
    assert_false(busy);
    ASSERT_OK(tms_handles_release(&f->saver, program.handles[0], &error), error);
    program.handles[0] = 0;
    end(&program);
}

static void a_forked_child_changes_nothing(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    CUmemGenericAllocationHandle memory = 0;
    tms_error_t error;
    map(&program, 0, TMS_BACKUP_NONE);
    atomic_store(&f->saver.forked, true); /* what process.c does in the child */
    ASSERT_OK(tms_handles_unmap(&f->saver, program.base, PIECE_BYTES, &error), error);
    ASSERT_OK(tms_handles_release(&f->saver, program.handles[0], &error), error);
    atomic_store(&f->saver.forked, false);
    assert_int_equal(used(), PIECE_BYTES);
    ASSERT_OK(tms_handles_memory(&f->saver, program.handles[0], &memory, &error), error);
    end(&program);
}

/* ---- failures ---- */

/* Creates and maps one handle if the driver lets it. PyTorch releases the handles that it could not map. */
static void try_map(program_t *program, int piece) {
    tms_saver_t *saver = &program->fixture->saver;
    const tms_region_settings_t settings = {.managed = true, .tag = "default", .backup = TMS_BACKUP_PINNED};
    tms_region_t region;
    tms_error_t error;
    uint64_t number = 0;
    bool busy = false;
    ASSERT_OK(tms_region_from_settings(&program->fixture->regions, &settings, &region, &error), error);
    if (tms_handles_create(saver, &region, PIECE_BYTES, 0, &number, &error) != TMS_OK) return;
    if (tms_handles_map(saver, place(program, piece), PIECE_BYTES, number, &busy, &error) == TMS_OK)
        program->handles[piece] = number;
    else
        ASSERT_OK(tms_handles_release(saver, number, &error), error);
    assert_false(busy);
}

static void a_failed_call_loses_nothing(void **state) {
    static const char *const calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"};
    fixture_t *f = *state;
    for (size_t call = 0; call < sizeof calls / sizeof *calls; call++) {
        bool fired = true;
        for (uint64_t succeed = 0; fired; succeed++) {
            const uint64_t before = simulator()->failures_fired();
            program_t program = reserve(f);
            tms_error_t error;
            simulator()->fail_after(calls[call], succeed, 1, CUDA_ERROR_UNKNOWN);
            for (int piece = 0; piece < PIECES; piece++) {
                try_map(&program, piece);
                if (program.handles[piece]) fill(place(&program, piece), PIECE_BYTES, (uint32_t)piece);
            }
            (void)pause_all(f, &error);
            if (resume_all(f, &error) != TMS_OK) ASSERT_OK(resume_all(f, &error), error);
            for (int piece = 0; piece < PIECES; piece++) {
                if (program.handles[piece]) assert_filled(place(&program, piece), PIECE_BYTES, (uint32_t)piece);
            }
            for (int piece = 0; piece < PIECES; piece++) {
                if (program.handles[piece]) unmap(&program, piece);
            }
            fired = simulator()->failures_fired() > before;
            simulator()->fail_after(calls[call], 0, 0, 0);
            tms_reclaim_all(&f->saver);
            assert_int_equal(used(), 0);
            end(&program);
        }
    }
}

/* The driver can neither give access nor undo the mapping, which the next map undoes. */
static void a_mapping_that_was_left_is_undone_by_the_next(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    const uint64_t number = create(&program, TMS_BACKUP_PINNED);
    tms_error_t error;
    bool busy = false;
    simulator()->fail_after("cuMemSetAccess", 0, 1, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_handles_map(&f->saver, place(&program, 0), PIECE_BYTES, number, &busy, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemSetAccess");
    assert_int_equal(tms_handles_map(&f->saver, place(&program, 1), PIECE_BYTES, number, &busy, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemUnmap");
    map_handle(&program, 1, number);
    fill(place(&program, 1), PIECE_BYTES, 1);
    assert_int_equal(used(), PIECE_BYTES);
    map(&program, 0, TMS_BACKUP_NONE); /* nothing is left there */
    assert_filled(place(&program, 1), PIECE_BYTES, 1);
    end(&program);
    assert_int_equal(used(), 0);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup_one_device, teardown)
    const struct CMUnitTest tests[] = {
        TEST(contents_come_back),
        TEST(each_handle_stays_one),
        TEST(unmapped_while_paused),
        cmocka_unit_test(a_device_that_comes_into_use_during_a_map_gets_access),
        TEST(references_keep_a_handle),
        TEST(a_handle_may_be_released_before_it_is_unmapped),
        TEST(a_handle_that_was_never_mapped_is_released),
        TEST(a_part_cannot_be_mapped_or_unmapped),
        TEST(too_little_memory_is_named),
        TEST(a_handle_gets_memory_that_could_not_be_released),
        TEST(parts_of_a_range_are_found),
        TEST(a_handle_that_was_unmapped_cannot_be_mapped_again),
        TEST(a_forked_child_changes_nothing),
        TEST(a_failed_call_loses_nothing),
        TEST(a_mapping_that_was_left_is_undone_by_the_next),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
