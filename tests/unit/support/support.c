#include "support.h"

#include "core/model/kinds.h"

#include <dlfcn.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_BYTES (256 * MIB)

const simulator_t *simulator(void) {
    static simulator_t controls;
    static bool ready;
    if (ready) return &controls;
    const char *path = getenv("TMS_CUDA_DRIVER");
    if (!path) fail_msg("TMS_CUDA_DRIVER must name the simulated GPU");
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) fail_msg("%s", dlerror());
#define SIMULATOR_RESOLVE(result, name, parameters)                                                                         \
    *(void **)&controls.name = dlsym(library, "tms_sim_" #name);                                                            \
    if (!controls.name) fail_msg("the simulator lacks tms_sim_" #name);
    SIMULATOR_CONTROLS(SIMULATOR_RESOLVE)
#undef SIMULATOR_RESOLVE
    ready = true;
    return &controls;
}

void fixture_begin(fixture_t *fixture, int devices) {
    tms_error_t error;
    simulator()->reset(devices, DEVICE_BYTES);
    *fixture = (fixture_t){0};
    tms_log_init(&fixture->log, TMS_LOG_WARNING);
    ASSERT_OK(tms_config_read(&fixture->config, &fixture->log, &error), error);
    tms_driver_init(&fixture->driver, fixture->config.driver_path, &fixture->log);
    tms_devices_init(&fixture->devices, &fixture->driver);
    ASSERT_OK(tms_region_init(&fixture->regions, &fixture->config, &error), error);
    ASSERT_OK(tms_saver_init(&fixture->saver, &fixture->config, &fixture->log, &fixture->devices, &fixture->regions, &error),
              error);
    heap_store_add(&fixture->heap, &fixture->saver.stores);
}

/* Frees a segment, whatever its state. */
static void free_segment(tms_saver_t *saver, const tms_segment_t *segment) {
    const uint64_t address = segment->node.begin;
    if (!tms_segment_is_of_program(segment)) {
        (void)tms_free_address(saver, address, NULL);
        return;
    }
    uint64_t number = 0;
    const bool has_handle = tms_handles_retain(saver, address, &number);
    (void)tms_handles_unmap(saver, address, tms_segment_reserved(segment), NULL);
    for (int i = 0; has_handle && i < 2; i++) (void)tms_handles_release(saver, number, NULL);
}

/* Frees every segment. No other thread may be in the saver. */
static void free_everything(tms_saver_t *saver) {
    tms_pending_resumes_close(&saver->pending_resumes, INFINITY);
    while (tms_capture_end_of(saver, 0)) continue;
    while (saver->registry.first) free_segment(saver, tms_segment_of(saver->registry.first));
    tms_reclaim_all(saver);
}

void fixture_end(fixture_t *fixture, int devices) {
    free_everything(&fixture->saver);
    tms_quarantine_retry(&fixture->saver.quarantine);
    tms_kinds_release(&fixture->saver);
    tms_saver_release(&fixture->saver);
    assert_int_equal(atomic_load(&fixture->heap.blocks), 0);
    assert_int_equal(atomic_load(&fixture->heap.batches), 0);
    assert_int_equal(atomic_load(&fixture->heap.relays), 0);
    for (int device = 0; device < devices; device++) {
        tms_sim_usage_t usage;
        simulator()->usage(device, &usage);
        assert_int_equal(usage.handles, 0);
        assert_int_equal(usage.mappings, 0);
        assert_int_equal(usage.reservations, 0);
        assert_int_equal(usage.host_bytes, 0);
        assert_int_equal(usage.streams, 0);
    }
    tms_region_release(&fixture->regions);
    tms_devices_release(&fixture->devices);
    tms_driver_release(&fixture->driver);
    tms_config_release(&fixture->config);
}

static int set_up(void **state, int devices, uint64_t memory_bytes) {
    tms_error_t error;
    tms_error_context_t context = {.operation = "test", .device = TMS_NO_DEVICE};
    fixture_t *fixture = malloc(sizeof *fixture);
    assert_non_null(fixture);
    fixture_begin(fixture, devices);
    simulator()->reset(devices, memory_bytes);
    ASSERT_OK(tms_devices_load(&fixture->devices, &fixture->cuda, &fixture->topology, &context, &error), error);
    /* The first entry creates the context and keeps it. */
    ASSERT_OK(tms_devices_enter(&fixture->devices, 0, &context, &error), error);
    tms_devices_leave(&fixture->devices, 0);
    simulator()->clear_counts();
    *state = fixture;
    return 0;
}

int setup_one_device(void **state) { return set_up(state, 1, DEVICE_BYTES); }
int setup_two_devices(void **state) { return set_up(state, 2, DEVICE_BYTES); }
int setup_three_devices(void **state) { return set_up(state, 3, DEVICE_BYTES); }
int setup_large_device(void **state) { return set_up(state, 1, 8 * GIB); }
int setup_huge_device(void **state) { return set_up(state, 1, 256 * GIB); }

int teardown(void **state) {
    fixture_t *fixture = *state;
    /* A test that fails in a callback never ends its pause or resume, and releasing memory would wait for that. */
    if (fixture->saver.transition_running) return -1;
    /* Nor may work left behind a gate, or copies that a test holds, block the end. */
    for (int gate = 1; gate <= fixture->last_gate; gate++) simulator()->open_gate(gate);
    simulator()->set_bandwidth(0);
    fixture_end(fixture, fixture->topology->count);
    free(fixture);
    return 0;
}

tms_driver_table_t *writable(fixture_t *fixture) { return (tms_driver_table_t *)(uintptr_t)fixture->cuda; }

void settle_host_memory(tms_saver_t *saver) {
    tms_host_store_t *store = &saver->stores.host;
    pthread_mutex_lock(&store->lock);
    while (store->threads > 0) pthread_cond_wait(&store->changed, &store->lock);
    pthread_mutex_unlock(&store->lock);
}

void assert_nothing_waits(tms_saver_t *saver) {
    tms_counters_t counters;
    settle_host_memory(saver);
    tms_inspect_counters(saver, &counters);
    assert_int_equal(counters.damaged, 0);
    assert_int_equal(counters.deferred_frees, 0);
    assert_int_equal(counters.quarantined_handles, 0);
    assert_int_equal(counters.quarantined_ranges, 0);
    assert_int_equal(counters.quarantined_host, 0);
    assert_int_equal(counters.quarantined_other, 0);
    assert_int_equal(saver->quarantined_ranges.count, 0);
    assert_false(tms_reclaim_is_needed(saver));
}

void assert_ok(tms_status_t status, const tms_error_t *error, const char *file, int line) {
    if (status != TMS_OK) {
        print_error("%s:%d: %s: %s\n", file, line, tms_status_name(status), error->message);
        _fail(file, line);
    }
}

uint64_t allocate_on(fixture_t *fixture, int device, const char *tag, tms_backup_kind_t backup, uint64_t bytes) {
    tms_error_t error;
    tms_tag_t *interned = NULL;
    uint64_t address = 0;
    ASSERT_OK(tms_tag_intern(&fixture->regions.tags, tag, &interned, &error), error);
    tms_region_t region = {.tag = interned, .backup = backup, .managed = true};
    ASSERT_OK(tms_allocation_create(&fixture->saver, &region, bytes, device, &address, &error), error);
    return address;
}

uint64_t allocate(fixture_t *fixture, const char *tag, tms_backup_kind_t backup, uint64_t bytes) {
    return allocate_on(fixture, 0, tag, backup, bytes);
}

static tms_selection_t selection_of(const char **tag) {
    return (tms_selection_t){.tags = *tag ? tag : NULL, .tag_count = *tag ? 1 : 0};
}

tms_status_t pause_with_report(fixture_t *fixture, const char *tag, tms_report_t *report, tms_error_t *error) {
    tms_selection_t selection = selection_of(&tag);
    return tms_pause_perform(&fixture->saver, &selection, report, error);
}

tms_status_t resume_with_report(fixture_t *fixture, const char *tag, tms_report_t *report, tms_error_t *error) {
    tms_selection_t selection = selection_of(&tag);
    return tms_resume_perform(&fixture->saver, &selection, report, error);
}

tms_status_t pause_selected_with_report(fixture_t *fixture, const tms_selection_t *selection, tms_report_t *report,
                                        tms_error_t *error) {
    return tms_pause_perform(&fixture->saver, selection, report, error);
}

tms_status_t resume_selected_with_report(fixture_t *fixture, const tms_selection_t *selection, tms_report_t *report,
                                         tms_error_t *error) {
    return tms_resume_perform(&fixture->saver, selection, report, error);
}

tms_status_t pause_tag(fixture_t *fixture, const char *tag, tms_error_t *error) {
    return pause_with_report(fixture, tag, NULL, error);
}

tms_status_t resume_tag(fixture_t *fixture, const char *tag, tms_error_t *error) {
    return resume_with_report(fixture, tag, NULL, error);
}

tms_status_t pause_all(fixture_t *fixture, tms_error_t *error) { return pause_tag(fixture, ALL_TAGS, error); }
tms_status_t resume_all(fixture_t *fixture, tms_error_t *error) { return resume_tag(fixture, ALL_TAGS, error); }

tms_status_t pause_selected(fixture_t *fixture, const tms_selection_t *selection, tms_error_t *error) {
    return pause_selected_with_report(fixture, selection, NULL, error);
}

tms_status_t resume_selected(fixture_t *fixture, const tms_selection_t *selection, tms_error_t *error) {
    return resume_selected_with_report(fixture, selection, NULL, error);
}

CUstream launch_behind_gate(fixture_t *fixture, int gate, uint64_t address) {
    tms_error_t error;
    tms_error_context_t context = {.operation = "test", .device = 0};
    CUstream stream = NULL;
    ASSERT_OK(tms_devices_enter(&fixture->devices, 0, &context, &error), error);
    assert_int_equal(fixture->cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    assert_int_equal(simulator()->launch_add(stream, address, MIB, 1, gate), CUDA_SUCCESS);
    if (gate > fixture->last_gate) fixture->last_gate = gate;
    tms_devices_leave(&fixture->devices, 0);
    return stream;
}

void destroy_stream(fixture_t *fixture, CUstream stream) {
    tms_error_t error;
    tms_error_context_t context = {.operation = "test", .device = 0};
    ASSERT_OK(tms_devices_enter(&fixture->devices, 0, &context, &error), error);
    assert_int_equal(fixture->cuda->cuStreamDestroy(stream), CUDA_SUCCESS);
    tms_devices_leave(&fixture->devices, 0);
}

static void *run_pause(void *argument) {
    held_pause_t *held = argument;
    held->status = pause_tag(held->fixture, held->tag, &held->error);
    atomic_store(&held->ended, true);
    return NULL;
}

void begin_pause(held_pause_t *held, fixture_t *fixture, const char *tag) {
    uint64_t waits = simulator()->calls("cuCtxSynchronize");
    *held = (held_pause_t){.fixture = fixture, .tag = tag};
    assert_int_equal(pthread_create(&held->thread, NULL, run_pause, held), 0);
    while (simulator()->calls("cuCtxSynchronize") == waits && !atomic_load(&held->ended)) sched_yield();
    if (atomic_load(&held->ended)) {
        (void)pthread_join(held->thread, NULL);
        fail_msg("the pause has ended without waiting for the device");
    }
    simulator()->wait_until_synchronizing();
}

void join_pause(held_pause_t *held) {
    assert_int_equal(pthread_join(held->thread, NULL), 0);
    ASSERT_OK(held->status, held->error);
}

static uint8_t pattern(uint64_t position, uint32_t seed) {
    return (uint8_t)((position * 2654435761u + seed * 40503u) >> 13);
}

/* Not under TSan, which would take minutes for all these bytes: another thread that writes there changes the contents. */
#define UNSEEN_BY_TSAN __attribute__((no_sanitize("thread")))

UNSEEN_BY_TSAN void fill(uint64_t address, uint64_t bytes, uint32_t seed) {
    uint8_t *memory = (uint8_t *)address;
    for (uint64_t i = 0; i < bytes; i++) memory[i] = pattern(i, seed);
}

UNSEEN_BY_TSAN void assert_filled_part(uint64_t address, uint64_t offset, uint64_t bytes, uint32_t seed) {
    const uint8_t *memory = (const uint8_t *)address;
    for (uint64_t i = offset; i < offset + bytes; i++) {
        if (memory[i] != pattern(i, seed)) fail_msg("byte %llu differs", (unsigned long long)i);
    }
}

void assert_filled(uint64_t address, uint64_t bytes, uint32_t seed) { assert_filled_part(address, 0, bytes, seed); }

void assert_poisoned(uint64_t address, uint64_t bytes) {
    const uint8_t *memory = (const uint8_t *)address;
    for (uint64_t i = 0; i < bytes; i++) {
        if (memory[i] != TMS_SIM_POISON) fail_msg("byte %llu is not fresh memory", (unsigned long long)i);
    }
}

static void *found_in_slot(fixture_t *f, const tms_backup_t *backup, tms_backup_kind_t kind) {
    const tms_backup_stores_t *stores = &f->saver.stores;
    const tms_backup_slot_t *slot = &backup->slots[tms_backup_stores_find(stores, kind) - stores->list];
    return slot->fresh ? slot->fresh : slot->kept;
}

view_t view_of(fixture_t *fixture, uint64_t address, uint64_t bytes) {
    tms_error_t error;
    view_t view = {NULL, NULL};
    ASSERT_OK(tms_inspect_host_backup(&fixture->saver, address, bytes, &view.buffer, &view.host, &error), error);
    return view;
}

tms_host_buffer_t *host_buffer_of(fixture_t *f, const tms_backup_t *backup) {
    return found_in_slot(f, backup, TMS_BACKUP_PINNED);
}

tms_disk_file_t *disk_file_of(fixture_t *f, const tms_backup_t *backup) { return found_in_slot(f, backup, TMS_BACKUP_DISK); }

uint64_t physical_bytes(int device) {
    tms_sim_usage_t usage;
    simulator()->usage(device, &usage);
    return usage.physical_bytes;
}

tms_segment_state_t state_of(fixture_t *fixture, uint64_t address) {
    tms_segment_info_t row;
    assert_int_equal(tms_inspect_find(&fixture->saver, address, 1, &row), TMS_OK);
    return (tms_segment_state_t)row.state;
}

bool is_managed(fixture_t *fixture, uint64_t address) {
    tms_segment_info_t row;
    return tms_inspect_find(&fixture->saver, address, 1, &row) == TMS_OK;
}
