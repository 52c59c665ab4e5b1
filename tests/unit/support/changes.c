#include "changes.h"

#include <string.h>

void retain(fixture_t *f) { atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN); }

uint64_t allocate_filled(fixture_t *f, const char *tag, tms_backup_kind_t backup, uint64_t bytes, uint32_t seed) {
    uint64_t address = allocate(f, tag, backup, bytes);
    fill(address, bytes, seed);
    return address;
}

void pause_copying(fixture_t *f, uint64_t copied, uint64_t unchanged) {
    tms_error_t error;
    tms_report_t report;
    ASSERT_OK(pause_with_report(f, ALL_TAGS, &report, &error), error);
    assert_int_equal(report.copied_bytes, copied);
    assert_int_equal(report.unchanged_bytes, unchanged);
}

void resume(fixture_t *f) {
    tms_error_t error;
    ASSERT_OK(resume_all(f, &error), error);
}

void cycle_copying(fixture_t *f, uint64_t copied, uint64_t unchanged) {
    pause_copying(f, copied, unchanged);
    resume(f);
}

void add_one(uint64_t address) { ++*(uint8_t *)(uintptr_t)address; }
void subtract_one(uint64_t address) { --*(uint8_t *)(uintptr_t)address; }

int32_t tell(void *context, tms_live_t *live) {
    const knowledge_t *known = context;
    *live = (tms_live_t){.allocations = known->addresses,
                         .allocation_count = known->addresses[1] ? 2 : 1,
                         .ranges = known->ranges,
                         .range_count = known->count};
    return 0;
}

void pause_live(fixture_t *f, knowledge_t *known, uint64_t copied, uint64_t unchanged) {
    tms_error_t error;
    tms_report_t report;
    const tms_selection_t selection = {.find_live = tell, .live_context = known};
    ASSERT_OK(pause_selected_with_report(f, &selection, &report, &error), error);
    assert_int_equal(report.copied_bytes, copied);
    assert_int_equal(report.unchanged_bytes, unchanged);
}

void note_progress(void *context, uint64_t done, uint64_t total) {
    progress_t *progress = context;
    progress->wrong |= done > total || done < progress->done;
    progress->done = done;
    progress->total = total;
    progress->calls++;
}

static void assert_complete(const progress_t *progress, uint64_t copied) {
    assert_false(progress->wrong);
    assert_int_equal(progress->calls > 0, copied > 0);
    assert_int_equal(progress->done, copied);
    assert_int_equal(progress->total, copied);
}

void cycle_with_progress(fixture_t *f, uint64_t copied, uint64_t unchanged) {
    progress_t pausing = {0}, resuming = {0};
    const tms_selection_t pause = {.on_progress = note_progress, .on_progress_context = &pausing};
    const tms_selection_t resume = {.on_progress = note_progress, .on_progress_context = &resuming};
    tms_report_t report;
    tms_error_t error;
    ASSERT_OK(pause_selected_with_report(f, &pause, &report, &error), error);
    assert_int_equal(report.copied_bytes, copied);
    assert_int_equal(report.unchanged_bytes, unchanged);
    assert_complete(&pausing, copied);
    ASSERT_OK(resume_selected(f, &resume, &error), error);
    assert_complete(&resuming, copied + unchanged);
}

static CUresult write_equal(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                            unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                            CUstream stream, void **parameters, void **extra) {
    (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)stream, (void)extra;
    void *const results = (void *)(uintptr_t)*(const CUdeviceptr *)parameters[2];
    memset(results, 1, *(const uint32_t *)parameters[1] * sizeof(tms_fingerprint_t));
    return CUDA_SUCCESS;
}

static CUresult write_nothing(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                              unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                              CUstream stream, void **parameters, void **extra) {
    (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)stream, (void)parameters, (void)extra;
    return CUDA_SUCCESS;
}

void launch_equal(fixture_t *f) { writable(f)->cuLaunchKernel = write_equal; }
void launch_nothing(fixture_t *f) { writable(f)->cuLaunchKernel = write_nothing; }
