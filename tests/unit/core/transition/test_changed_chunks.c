/* Guards pauses that copy only the chunks that have changed since the last pause: which bytes are copied, by how many driver
 * calls, when everything is copied, and that every byte comes back. */

#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "changes.h"
#include "temporary.h"

static uint64_t copies(void) { return simulator()->calls("cuMemcpyDtoHAsync") + simulator()->calls("cuMemcpyBatchAsync"); }

static char *log_of(void (*act)(fixture_t *f), fixture_t *f) {
    static char text[16384];
    FILE *file = tmpfile();
    int before = dup(STDERR_FILENO);
    assert_true(file && before >= 0);
    fflush(stderr);
    assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
    act(f);
    fflush(stderr);
    assert_true(dup2(before, STDERR_FILENO) >= 0);
    close(before);
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    return text;
}

/* ---- what is copied ---- */

static void what_has_not_changed_is_not_copied(void **state) {
    fixture_t *f = *state;
    static const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP};
    retain(f);
    for (size_t i = 0; i < 2; i++) {
        tms_error_t error;
        uint64_t address = allocate_filled(f, "a", kinds[i], BYTES, 1);
        cycle_copying(f, BYTES, 0);
        for (int cycle = 0; cycle < 3; cycle++) {
            simulator()->clear_counts();
            pause_copying(f, 0, BYTES);
            assert_int_equal(copies(), 0);
            assert_int_equal(simulator()->calls("cuLaunchKernel"), 1);
            resume(f);
            assert_filled(address, BYTES, 1);
        }
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

static struct {
    __typeof__(((tms_driver_table_t *)NULL)->cuMemcpyBatchAsync) copy;
    size_t parts;
} batch;

static CUresult count_parts(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                            struct CUmemcpyAttributes_st *attributes, size_t *first_copies, size_t attribute_count,
                            CUstream stream) {
    batch.parts += count;
    return batch.copy(targets, sources, sizes, count, attributes, first_copies, attribute_count, stream);
}

static void a_changed_byte_copies_its_chunk_and_neighbours_are_one_copy(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    add_one(address + 3 * CHUNK + 5);
    cycle_copying(f, CHUNK, BYTES - CHUNK);
    subtract_one(address + 3 * CHUNK + 5);
    add_one(address + CHUNK - 1); /* the end of the first, the start of the second, and all of the last */
    add_one(address + CHUNK);
    fill(address + 7 * CHUNK, CHUNK, 2);
    simulator()->clear_counts();
    batch.copy = f->cuda->cuMemcpyBatchAsync;
    batch.parts = 0;
    writable(f)->cuMemcpyBatchAsync = count_parts;
    pause_copying(f, 4 * CHUNK, BYTES - 4 * CHUNK);
    assert_int_equal(copies(), 1);
    assert_int_equal(batch.parts, 3);
    resume(f);
    subtract_one(address + CHUNK - 1);
    subtract_one(address + CHUNK);
    assert_filled_part(address, 0, 7 * CHUNK, 1);
    assert_filled(address + 7 * CHUNK, CHUNK, 2);
}

/* The size of an allocation need not be a multiple of anything. */
static void the_last_byte_of_an_odd_size_counts(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 2 * CHUNK + 1;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, bytes, 1);
    cycle_copying(f, bytes, 0);
    cycle_copying(f, 0, bytes);
    add_one(address + bytes - 1);
    cycle_copying(f, 1, bytes - 1);
    subtract_one(address + bytes - 1);
    assert_filled(address, bytes, 1);
}

static void each_device_has_its_own_kernel(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address[2];
    retain(f);
    for (int device = 0; device < 2; device++) {
        address[device] = allocate_on(f, device, "a", TMS_BACKUP_PINNED, BYTES);
        fill(address[device], BYTES, (uint32_t)device);
    }
    cycle_copying(f, 2 * BYTES, 0);
    add_one(address[1]);
    simulator()->clear_counts();
    pause_copying(f, CHUNK, 2 * BYTES - CHUNK);
    assert_int_equal(simulator()->calls("cuLaunchKernel"), 2);
    assert_int_equal(simulator()->calls("cuModuleLoadData"), 0); /* loaded by the first pause */
    resume(f);
    subtract_one(address[1]);
    for (int device = 0; device < 2; device++) assert_filled(address[device], BYTES, (uint32_t)device);
    for (int device = 0; device < 2; device++) ASSERT_OK(tms_free_address(&f->saver, address[device], &error), error);
}

/* A module ends with its context. The next one has another key, so that all fingerprints differ. */
static void a_context_that_was_reset_gets_another_module(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    f->saver.stores.fingerprinter.modules[0].context++; /* as if the module belonged to an earlier context */
    simulator()->clear_counts();
    pause_copying(f, BYTES, 0);
    assert_int_equal(simulator()->calls("cuModuleLoadData"), 1);
    resume(f);
    cycle_copying(f, 0, BYTES);
    assert_filled(address, BYTES, 1);
}

/* ---- who retains ---- */

static void without_retained_backups_nothing_is_computed(void **state) {
    fixture_t *f = *state;
    (void)allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    simulator()->clear_counts();
    for (int cycle = 0; cycle < 2; cycle++) {
        cycle_copying(f, BYTES, 0);
    }
    assert_int_equal(simulator()->calls("cuModuleLoadData"), 0);
    assert_int_equal(simulator()->calls("cuLaunchKernel"), 0);
    assert_int_equal(simulator()->calls("cuMemHostGetDevicePointer"), 0);
}

static void a_resume_that_retains_makes_the_pause_after_next_partial(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t retaining = {.host_policy = TMS_HOST_RETAIN};
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    static const uint64_t copied[] = {8, 8, 0, 0}; /* chunks */
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++) {
        pause_copying(f, copied[i] * CHUNK, BYTES - copied[i] * CHUNK);
        ASSERT_OK(resume_selected(f, &retaining, &error), error);
    }
    cycle_copying(f, 0, BYTES); /* which gives the backup up */
    cycle_copying(f, BYTES, 0);
    assert_filled(address, BYTES, 1);
}

static void a_pause_with_another_backup_drops_the_copy_and_its_fingerprints(void **state) {
    fixture_t *f = *state;
    static const tms_backup_kind_t others[] = {TMS_BACKUP_NONE, TMS_BACKUP_DISK, TMS_BACKUP_MMAP};
    char directory[TEMPORARY_BYTES];
    tms_error_t error;
    retain(f);
    assert_non_null(make_temporary_directory(directory, "changes"));
    ASSERT_OK(tms_disk_set_directory(&f->saver.stores.disk, directory, &error), error);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const tms_selection_t other = {.has_backup = 1, .backup = others[i]};
        cycle_copying(f, BYTES, 0);
        cycle_copying(f, 0, BYTES);
        ASSERT_OK(pause_selected(f, &other, &error), error);
        resume(f);
        fill(address, BYTES, 1);
    }
    assert_int_equal(remove_temporary_directory(directory), 0);
}

/* ---- live bytes ---- */

/* What is free may change: it is neither kept nor compared. */
static void only_live_bytes_are_compared(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    const uint64_t first = 2 * CHUNK + 512, second = 512;
    knowledge_t known = {
        .addresses = {address},
        .ranges = {{address + 512, address + 512 + first}, {address + 6 * CHUNK, address + 6 * CHUNK + second}},
        .count = 2};
    pause_live(f, &known, first + second, 0);
    resume(f);
    pause_live(f, &known, 0, first + second);
    resume(f);
    fill(address + 3 * CHUNK, 3 * CHUNK, 2); /* free */
    pause_live(f, &known, 0, first + second);
    resume(f);
    add_one(address + 6 * CHUNK + second - 1);
    pause_live(f, &known, second, first);
    resume(f);
    add_one(address + 512 + CHUNK);
    pause_live(f, &known, CHUNK, first + second - CHUNK);
    resume(f);
    subtract_one(address + 512 + CHUNK);
    subtract_one(address + 6 * CHUNK + second - 1);
    assert_filled_part(address, 512, first, 1);
    assert_filled_part(address, 6 * CHUNK, second, 1);
}

/* The kernel reads whole vectors, so that up to 15 free bytes count as well. */
static void a_live_range_may_begin_and_end_anywhere(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    const uint64_t begin = 3, end = 4 * CHUNK + 5;
    knowledge_t known = {.addresses = {address}, .ranges = {{address + begin, address + end}}, .count = 1};
    const tms_selection_t selection = {.find_live = tell, .live_context = &known};
    for (uint64_t place = begin; place < end; place += CHUNK / 2) {
        tms_report_t report;
        add_one(address + place);
        ASSERT_OK(pause_selected_with_report(f, &selection, &report, &error), error);
        if (place > begin) assert_in_range(report.unchanged_bytes, CHUNK, end - begin);
        resume(f);
        subtract_one(address + place);
        assert_filled_part(address, begin, end - begin, 1);
    }
}

/* The bytes before the first whole vector of the range, and after the last one. */
static void the_ends_of_an_unaligned_range_are_compared(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    const uint64_t begin = address + 3, end = address + 4 * CHUNK + 5, places[] = {begin, begin + 12, end - 1};
    knowledge_t known = {.addresses = {address}, .ranges = {{begin, end}}, .count = 1};
    pause_live(f, &known, end - begin, 0);
    resume(f);
    pause_live(f, &known, CHUNK + 2, 3 * CHUNK); /* the kernel reads whole vectors, and the free bytes there are lost */
    resume(f);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const uint64_t copied = places[i] == end - 1 ? 5 : CHUNK - 3;
        add_one(places[i]);
        pause_live(f, &known, copied, end - begin - copied);
        resume(f);
        subtract_one(places[i]);
        assert_filled_part(address, 3, end - begin, 1);
        pause_live(f, &known, copied, end - begin - copied);
        resume(f);
    }
}

static void another_live_set_copies_all_of_its_segment_only(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t a = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1),
             b = allocate_filled(f, "b", TMS_BACKUP_PINNED, BYTES, 2);
    const uint64_t low = a < b ? a : b, high = a < b ? b : a;
    knowledge_t known = {.addresses = {low, high},
                         .ranges = {{low, low + CHUNK}, {low + 2 * CHUNK, low + 3 * CHUNK}, {high, high + BYTES}},
                         .count = 3};
    pause_live(f, &known, 2 * CHUNK + BYTES, 0);
    resume(f);
    pause_live(f, &known, 0, 2 * CHUNK + BYTES);
    resume(f);
    known.ranges[1].end += CHUNK;
    pause_live(f, &known, 3 * CHUNK, BYTES);
    resume(f);
    pause_live(f, &known, 0, 3 * CHUNK + BYTES);
    resume(f);
}

/* ---- views ---- */

/* A program may write to a view of the backup at any time. The write never reaches the device after a later pause. */
static void a_segment_whose_copy_was_handed_out_is_copied_whole(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    uint64_t other = allocate_filled(f, "b", TMS_BACKUP_PINNED, BYTES, 2);
    cycle_copying(f, 2 * BYTES, 0);
    view_t view = view_of(f, address, BYTES);
    for (int cycle = 0; cycle < 3; cycle++) { /* as long as the program has it */
        memset(view.host, cycle, BYTES);
        cycle_copying(f, BYTES, BYTES);
        assert_filled(address, BYTES, 1);
    }
    memset(view.host, 1, BYTES);
    tms_host_buffer_drop(view.buffer); /* and once more */
    cycle_copying(f, BYTES, BYTES);
    cycle_copying(f, 0, 2 * BYTES);
    assert_filled(address, BYTES, 1);
    assert_filled(other, BYTES, 2);
}

static void a_copy_that_was_only_read_is_not_copied_again(void **state) {
    fixture_t *f = *state;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    tms_error_t error;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    ASSERT_OK(tms_inspect_read_only_backup(&f->saver, address, BYTES, &buffer, &host, &error), error);
    assert_non_null(host);
    tms_host_buffer_drop(buffer);
    cycle_copying(f, 0, BYTES);
}

/* ---- failures ---- */

/* The copy of the first was overwritten, and that of the second may have been. */
static void after_a_late_failure_what_was_overwritten_is_copied_whole(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    uint64_t first = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    uint64_t second = allocate_filled(f, "b", TMS_BACKUP_PINNED, BYTES, 2);
    uint64_t third = allocate_filled(f, "c", TMS_BACKUP_PINNED, BYTES, 3);
    cycle_copying(f, 3 * BYTES, 0);
    add_one(first);
    add_one(second);
    simulator()->fail_after("cuMemcpyDtoHAsync", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_null(view_of(f, first, BYTES).host);
    cycle_copying(f, 2 * BYTES, BYTES);
    cycle_copying(f, 0, 3 * BYTES);
    subtract_one(first);
    subtract_one(second);
    assert_filled(first, BYTES, 1);
    assert_filled(second, BYTES, 2);
    assert_filled(third, BYTES, 3);
}

/* Fails until the driver loads the module and launches the kernel: everything is copied, which is logged once. */
static void pause_twice_copying_all(fixture_t *f) {
    for (int i = 0; i < 2; i++) {
        cycle_copying(f, BYTES, 0);
    }
}

static void without_the_kernel_everything_is_copied(void **state) {
    fixture_t *f = *state;
    static const struct {
        const char *call;
        CUresult result;
    } cases[] = {
        {"cuModuleLoadData", CUDA_ERROR_JIT_COMPILER_NOT_FOUND}, {"cuModuleLoadData", CUDA_ERROR_OUT_OF_MEMORY},
        {"cuModuleGetFunction", CUDA_ERROR_NOT_FOUND},           {"cuModuleGetGlobal", CUDA_ERROR_NOT_FOUND},
        {"cuMemHostGetDevicePointer", CUDA_ERROR_INVALID_VALUE}, {"cuLaunchKernel", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES},
        {"cuMemHostRegister", CUDA_ERROR_OPERATING_SYSTEM},
    };
    retain(f);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tms_error_t error;
        tms_fingerprinter_release(&f->saver.stores.fingerprinter, &f->devices);
        tms_host_store_trim(&f->saver.stores.host); /* the buffer of the fingerprints is pinned again */
        tms_log_init(&f->log, TMS_LOG_WARNING);
        uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
        simulator()->fail_after(cases[i].call, 0, 1000, (int)cases[i].result);
        const char *logged = log_of(pause_twice_copying_all, f);
        const char *line = strstr(logged, "All contents are copied");
        if (!line || strstr(line + 1, "All contents are copied")) fail_msg("%s: %s", cases[i].call, logged);
        simulator()->fail_after(cases[i].call, 0, 0, CUDA_SUCCESS);
        pause_copying(f, BYTES, 0); /* and computes fingerprints again */
        resume(f);
        cycle_copying(f, 0, BYTES);
        assert_filled(address, BYTES, 1);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

static void without_compilation_in_the_driver_everything_is_copied(void **state) {
    fixture_t *f = *state;
    retain(f);
    (void)allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    assert_int_equal(setenv("CUDA_DISABLE_PTX_JIT", "1", 1), 0);
    const char *logged = log_of(pause_twice_copying_all, f);
    assert_int_equal(unsetenv("CUDA_DISABLE_PTX_JIT"), 0);
    assert_non_null(strstr(logged, "cuModuleLoadData failed with CUDA_ERROR_JIT_COMPILATION_DISABLED"));
}

/* The module needs 2 MiB of the simulated device. */
static void on_a_full_device_everything_is_copied(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t free_bytes = 0, total = 0;
    const tms_error_context_t context = {.operation = "test"};
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    ASSERT_OK(tms_devices_memory(&f->devices, 0, &free_bytes, &total, &context, &error), error);
    assert_int_equal(simulator()->take_memory(0, (int64_t)free_bytes), 0);
    const char *logged = log_of(pause_twice_copying_all, f);
    assert_non_null(strstr(logged, "cuModuleLoadData failed with CUDA_ERROR_OUT_OF_MEMORY"));
    assert_int_equal(simulator()->take_memory(0, -(int64_t)free_bytes), 0);
    cycle_copying(f, BYTES, 0);
    cycle_copying(f, 0, BYTES);
    assert_filled(address, BYTES, 1);
}

/* The kernel may still be reading the memory: it stays mapped, and the pause fails. */
static void a_device_that_cannot_be_waited_for_fails_the_pause(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    static const char *const calls[] = {"cuStreamSynchronize", "cuCtxPushCurrent"};
    for (size_t i = 0; i < 2; i++) {
        bool reached = true;
        int failed = 0;
        for (uint64_t before = 0; reached; before++) {
            const uint64_t fired = simulator()->failures_fired();
            simulator()->fail_after(calls[i], before, 1, CUDA_ERROR_UNKNOWN);
            const tms_status_t status = pause_all(f, &error);
            reached = simulator()->failures_fired() > fired;
            simulator()->fail_after(calls[i], 0, 0, CUDA_SUCCESS);
            assert_int_equal(state_of(f, address), status == TMS_OK ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_ACTIVE);
            if (status != TMS_OK) {
                failed++;
                assert_string_equal(error.call, calls[i]);
                pause_copying(f, 0, BYTES); /* nothing was overwritten */
            }
            resume(f);
            cycle_copying(f, 0, BYTES);
        }
        assert_true(failed > 0);
    }
    assert_nothing_waits(&f->saver);
    assert_filled(address, BYTES, 1);
}

static int32_t cancel(void *context) {
    (void)context;
    return 1;
}

static int32_t tell_nothing(void *context, tms_live_t *live) {
    (void)context;
    (void)live;
    return 1;
}

static void the_buffer_of_the_kernel_is_used_again(void **state) {
    fixture_t *f = *state;
    retain(f);
    (void)allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    cycle_copying(f, 0, BYTES);
    simulator()->clear_counts();
    cycle_copying(f, 0, BYTES);
    assert_int_equal(simulator()->calls("cuLaunchKernel"), 1);
    assert_int_equal(simulator()->calls("cuMemHostRegister"), 0);
}

static void pause_what_has_no_live_byte(fixture_t *f) {
    knowledge_t known = {.addresses = {tms_segment_address(tms_segment_of(f->saver.registry.first))}, .count = 0};
    for (int cycle = 0; cycle < 3; cycle++) {
        pause_live(f, &known, 0, 0);
        resume(f);
    }
}

static void contents_without_a_byte_need_no_kernel(void **state) {
    fixture_t *f = *state;
    retain(f);
    (void)allocate(f, "a", TMS_BACKUP_PINNED, BYTES);
    simulator()->clear_counts();
    assert_string_equal(log_of(pause_what_has_no_live_byte, f), "");
    assert_int_equal(simulator()->calls("cuMemHostGetDevicePointer"), 0);
}

static void a_pause_cancelled_while_the_kernel_runs_changes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    add_one(address);
    const tms_selection_t selection = {.interrupted = cancel, .find_live = tell_nothing};
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    cycle_copying(f, CHUNK, BYTES - CHUNK);
    subtract_one(address);
    assert_filled(address, BYTES, 1);
    assert_nothing_waits(&f->saver);
}

/* The buffer of the results is that of the pass before. */
static void a_kernel_that_writes_nothing_does_not_hide_a_change(void **state) {
    fixture_t *f = *state;
    retain(f);
    uint64_t address = allocate_filled(f, "a", TMS_BACKUP_PINNED, BYTES, 1);
    cycle_copying(f, BYTES, 0);
    cycle_copying(f, 0, BYTES);
    launch_nothing(f);
    for (int pass = 0; pass < 3; pass++) {
        add_one(address + 3 * CHUNK);
        cycle_copying(f, BYTES, 0);
    }
    for (int pass = 0; pass < 3; pass++) subtract_one(address + 3 * CHUNK);
    assert_filled(address, BYTES, 1);
}

/* ---- everything at random ---- */

/* Writes of random sizes at random places between pauses, some of which fail, and live sets that change now and then. */
static void every_byte_comes_back_after_random_writes(void **state) {
    fixture_t *f = *state;
    enum { SEGMENTS = 3, CYCLES = 300, MAX_WRITES = 4 };
    static const uint64_t sizes[SEGMENTS] = {TMS_FINGERPRINT_CHUNK_BYTES * 2 + 12345, 70000, TMS_FINGERPRINT_CHUNK_BYTES};
    uint64_t address[SEGMENTS], copied = 0, unchanged = 0, failed = 0;
    uint8_t *expected[SEGMENTS];
    unsigned seed = 1;
    retain(f);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    for (int i = 0; i < SEGMENTS; i++) {
        address[i] = allocate_filled(f, "a", i == 1 ? TMS_BACKUP_MMAP : TMS_BACKUP_PINNED, sizes[i], (uint32_t)i);
        expected[i] = malloc(sizes[i]);
        assert_non_null(expected[i]);
        memcpy(expected[i], (const void *)(uintptr_t)address[i], sizes[i]);
    }
    for (int cycle = 0; cycle < CYCLES; cycle++) {
        tms_error_t error;
        tms_report_t report;
        for (int n = rand_r(&seed) % (MAX_WRITES + 1); n > 0; n--) {
            const int i = rand_r(&seed) % SEGMENTS;
            const uint64_t offset = (uint64_t)rand_r(&seed) % sizes[i], left = sizes[i] - offset;
            const uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % (rand_r(&seed) % 2 ? left : left < 64 ? left : 64);
            memset((void *)(uintptr_t)(address[i] + offset), cycle, bytes);
            memset(expected[i] + offset, cycle, bytes);
        }
        if (rand_r(&seed) % 8 == 0) {
            static const char *const calls[] = {"cuMemcpyBatchAsync", "cuStreamSynchronize", "cuLaunchKernel",
                                                "cuMemcpyDtoHAsync"};
            simulator()->fail_after(calls[rand_r(&seed) % 4], (uint64_t)(rand_r(&seed) % 3), 1, CUDA_ERROR_UNKNOWN);
        }
        while (pause_with_report(f, ALL_TAGS, &report, &error) != TMS_OK) failed++;
        copied += report.copied_bytes;
        unchanged += report.unchanged_bytes;
        while (resume_all(f, &error) != TMS_OK) failed++;
        for (int i = 0; i < SEGMENTS; i++) assert_memory_equal((const void *)(uintptr_t)address[i], expected[i], sizes[i]);
    }
    print_message("%d cycles: %llu bytes copied, %llu unchanged, %llu failed calls\n", CYCLES, (unsigned long long)copied,
                  (unsigned long long)unchanged, (unsigned long long)failed);
    assert_true(copied > 0 && unchanged > 0 && failed > 0);
    for (int i = 0; i < SEGMENTS; i++) free(expected[i]);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(what_has_not_changed_is_not_copied),
        ONE(a_changed_byte_copies_its_chunk_and_neighbours_are_one_copy),
        ONE(the_last_byte_of_an_odd_size_counts),
        cmocka_unit_test_setup_teardown(each_device_has_its_own_kernel, setup_two_devices, teardown),
        ONE(a_context_that_was_reset_gets_another_module),
        ONE(without_retained_backups_nothing_is_computed),
        ONE(a_resume_that_retains_makes_the_pause_after_next_partial),
        ONE(a_pause_with_another_backup_drops_the_copy_and_its_fingerprints),
        ONE(only_live_bytes_are_compared),
        ONE(a_live_range_may_begin_and_end_anywhere),
        ONE(the_ends_of_an_unaligned_range_are_compared),
        ONE(another_live_set_copies_all_of_its_segment_only),
        ONE(a_segment_whose_copy_was_handed_out_is_copied_whole),
        ONE(a_copy_that_was_only_read_is_not_copied_again),
        ONE(after_a_late_failure_what_was_overwritten_is_copied_whole),
        ONE(without_the_kernel_everything_is_copied),
        ONE(a_kernel_that_writes_nothing_does_not_hide_a_change),
        ONE(without_compilation_in_the_driver_everything_is_copied),
        ONE(on_a_full_device_everything_is_copied),
        ONE(a_device_that_cannot_be_waited_for_fails_the_pause),
        ONE(the_buffer_of_the_kernel_is_used_again),
        ONE(contents_without_a_byte_need_no_kernel),
        ONE(a_pause_cancelled_while_the_kernel_runs_changes_nothing),
        ONE(every_byte_comes_back_after_random_writes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
