/* A call that is told to stop, wherever it waits: everything is as it was, and the same call can be made again. */

#include "support.h"

#include <math.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "own_process.h"

enum { GATE = 1 };

/* What `interrupted` does when it is asked, and what it answers. */
typedef struct asker {
    fixture_t *fixture;
    int asked;
    bool stop;
    int gate;         /* to open, or 0 */
    uint64_t address; /* to free, or 0 */
    bool nested;      /* calls pause and resume */
    tms_status_t results[2];
    tms_error_t error;
} asker_t;

static int32_t ask(void *context) {
    asker_t *asker = context;
    asker->asked++;
    if (asker->nested) {
        assert_true(tms_transition_is_inside());
        asker->results[0] = pause_tag(asker->fixture, NULL, NULL, &asker->error);
        asker->results[1] = resume_tag(asker->fixture, NULL, NULL, &asker->error);
    }
    if (asker->address && asker->asked == 1)
        asker->results[0] = tms_saver_free(&asker->fixture->saver, asker->address, NULL);
    if (asker->gate) simulator()->open_gate(asker->gate);
    return asker->stop;
}

static tms_selection_t asking(asker_t *asker) { return (tms_selection_t){.interrupted = ask, .interrupt_context = asker}; }

static void assert_states(fixture_t *f, const uint64_t *addresses, size_t count, tms_segment_state_t expected) {
    for (size_t i = 0; i < count; i++) assert_int_equal(state_of(f, addresses[i]), expected);
}

/* What an interrupted call has left to be given back when the device rests goes with the next one. */
static void assert_nothing_held(fixture_t *f) {
    tms_sim_usage_t usage;
    tms_saver_reclaim(&f->saver);
    settle_host_memory(&f->saver);
    tms_host_store_settle(&f->saver.stores.host);
    simulator()->usage(0, &usage);
    assert_int_equal(usage.host_bytes, 0);
    assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes), 0);
    assert_int_equal(atomic_load(&f->saver.stores.disk_bytes), 0);
}

/* ---- while it waits for the devices ---- */

static void a_pause_that_waits_for_the_gpu_stops(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    asker_t asker = {.stop = true};
    tms_selection_t selection = asking(&asker);
    uint64_t addresses[] = {allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB), allocate(f, "b", TMS_BACKUP_MMAP, 2 * MIB),
                            allocate(f, "c", TMS_BACKUP_DISK, 2 * MIB), allocate(f, "d", TMS_BACKUP_NONE, 2 * MIB)};
    for (uint32_t i = 0; i < 4; i++) fill(addresses[i], 2 * MIB, i);
    CUstream stream = launch_behind_gate(f, GATE, addresses[3]);

    simulator()->clear_counts();
    assert_int_equal(pause_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
    /* On a GPU these two would have waited for the work, and nobody could have stopped them. */
    assert_int_equal(simulator()->calls("cuMemHostRegister"), 0);
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
    assert_string_equal(error.operation, "pause");
    assert_false(tms_transition_is_inside());
    assert_states(f, addresses, 4, TMS_SEGMENT_ACTIVE);
    assert_int_equal(physical_bytes(0), 8 * MIB);
    assert_nothing_held(f);
    for (uint32_t i = 0; i < 4; i++) assert_filled(addresses[i], 2 * MIB, i);

    simulator()->open_gate(GATE);
    asker.stop = false;
    ASSERT_OK(pause_selected(f, &selection, &report, &error), error);
    assert_int_equal(report.allocations, 4);
    assert_int_equal(physical_bytes(0), 0);
    ASSERT_OK(resume_selected(f, &selection, &report, &error), error);
    for (uint32_t i = 0; i < 3; i++) assert_filled(addresses[i], 2 * MIB, i);
    destroy_stream(f, stream);
}

static void a_pause_that_is_only_asked_goes_on(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.gate = GATE};
    tms_selection_t selection = asking(&asker);
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 1);
    uint8_t before = *(uint8_t *)address;
    CUstream stream = launch_behind_gate(f, GATE, address);
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error); /* the question opens the gate */
    assert_true(asker.asked >= 1);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_int_equal(*(uint8_t *)address, (uint8_t)(before + 1)); /* the backup was made after the work */
    destroy_stream(f, stream);
}

/* ---- what may be done when asked ---- */

static void calls_from_inside_are_refused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .nested = true, .gate = GATE};
    tms_selection_t selection = asking(&asker);
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, address);
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_true(asker.asked >= 1);
    assert_int_equal(asker.results[0], TMS_INVALID_STATE);
    assert_int_equal(asker.results[1], TMS_INVALID_STATE);
    assert_non_null(strstr(asker.error.message, "signal handlers"));
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    assert_false(tms_transition_is_inside());
    destroy_stream(f, stream);
}

static void a_free_from_inside_is_finished_at_the_end(void **state) {
    for (int stop = 0; stop < 2; stop++) {
        fixture_t *f = *state;
        tms_error_t error;
        int gate = GATE + stop;
        uint64_t kept = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), freed = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
        CUstream stream = launch_behind_gate(f, gate, kept);
        asker_t asker = {.fixture = f, .address = freed, .gate = gate, .stop = stop};
        tms_selection_t selection = asking(&asker);
        assert_int_equal(pause_selected(f, &selection, NULL, &error), stop ? TMS_INTERRUPTED : TMS_OK);
        assert_int_equal(asker.results[0], TMS_OK);
        assert_false(tms_saver_owns(&f->saver, freed));
        /* One that is to stop does not wait for the device; the next call takes the memory. */
        assert_int_equal(physical_bytes(0), stop ? 4 * MIB : 0);
        asker.stop = false;
        ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
        assert_int_equal(physical_bytes(0), 0);
        assert_int_equal(tms_saver_free(&f->saver, kept, &error), TMS_OK);
        destroy_stream(f, stream);
    }
}

/* The work goes on for ever, as that of a device that hangs does. */
static void no_free_keeps_a_call_from_stopping(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t kept = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), freed = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, kept);
    for (int call = 0; call < 2; call++) { /* the second one finds what the first has deferred */
        asker_t asker = {.fixture = f, .address = call == 0 ? freed : 0, .stop = true};
        tms_selection_t selection = asking(&asker);
        assert_int_equal(pause_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
        tms_saver_counters(&f->saver, &counters);
        assert_int_equal(counters.deferred_frees, 1);
        assert_int_equal(state_of(f, kept), TMS_SEGMENT_ACTIVE);
        assert_int_equal(physical_bytes(0), 4 * MIB);
    }
    simulator()->open_gate(GATE);
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    assert_int_equal(physical_bytes(0), 0);
    destroy_stream(f, stream);
}

/* Taking page-locked memory back waits for the device, on an H200 as here. Refused once, it is tried again by the next call.
 */
static void no_refused_host_memory_keeps_a_call_from_stopping(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    tms_log_init(&f->log, TMS_LOG_SILENT);
    uint64_t kept = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), other = allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    uint64_t backed = allocate(f, "c", TMS_BACKUP_PINNED, 2 * MIB);
    ASSERT_OK(pause_tag(f, "c", NULL, &error), error);
    ASSERT_OK(pause_tag(f, "b", NULL, &error), error);
    simulator()->fail_after("cuMemHostUnregister", 0, 1, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(resume_tag(f, "c", NULL, &error), error);
    settle_host_memory(&f->saver);
    CUstream stream = launch_behind_gate(f, GATE, kept);

    asker_t asker = {.stop = true};
    tms_selection_t selection = asking(&asker);
    assert_int_equal(pause_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
    tms_saver_counters(&f->saver, &counters);
    assert_int_equal(counters.quarantined_host, 1);     /* a thread waits with it */
    ASSERT_OK(resume_tag(f, "b", NULL, &error), error); /* needs nothing of the device's */
    assert_int_equal(state_of(f, other), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, backed), TMS_SEGMENT_ACTIVE);
    simulator()->open_gate(GATE);
    assert_nothing_held(f);
    destroy_stream(f, stream);
}

/* ---- while it waits for its turn ---- */

static void a_call_that_waits_for_its_turn_stops(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    held_pause_t other;
    uint64_t held = allocate(f, "held", TMS_BACKUP_NONE, 2 * MIB), mine = allocate(f, "mine", TMS_BACKUP_NONE, 2 * MIB);
    fill(mine, 2 * MIB, 1);
    CUstream stream = launch_behind_gate(f, GATE, held);
    begin_pause(&other, f, "held");

    asker_t asker = {.stop = true};
    tms_selection_t selection = asking(&asker);
    assert_int_equal(pause_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
    assert_int_equal(asker.asked, 1);
    asker = (asker_t){.stop = true};
    assert_int_equal(resume_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
    assert_int_equal(state_of(f, mine), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, held), TMS_SEGMENT_PAUSING);

    asker = (asker_t){.gate = GATE}; /* and one that goes on gets the turn after the other */
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    join_pause(&other);
    assert_int_equal(physical_bytes(0), 0);
    destroy_stream(f, stream);
}

/* ---- while it copies ---- */

enum { COPIED = 8 };

/* Slow enough that several chunks take longer than the time between two questions. */
static void copy_slowly(fixture_t *f) {
    f->saver.stores.copy_chunk_bytes = MIB;
    f->saver.stores.chunk_bytes = MIB;
    simulator()->set_bandwidth(16 * MIB);
}

static void a_copy_stops_between_chunks(void **state) {
    fixture_t *f = *state;
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
    for (uint32_t i = 0; i < 3; i++) {
        tms_error_t error;
        uint64_t address = allocate(f, "a", kinds[i], COPIED * MIB + 5);
        asker_t asker = {.stop = true};
        tms_selection_t selection = asking(&asker);
        fill(address, COPIED * MIB + 5, i);
        copy_slowly(f);
        simulator()->clear_counts();
        assert_int_equal(pause_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
        assert_true(simulator()->calls("cuMemcpyDtoHAsync") < COPIED);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        assert_filled(address, COPIED * MIB + 5, i);
        assert_nothing_held(f);

        simulator()->set_bandwidth(0);
        asker.stop = false;
        ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
        copy_slowly(f);
        asker.stop = true;
        simulator()->clear_counts();
        assert_int_equal(resume_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
        assert_true(simulator()->calls("cuMemcpyHtoDAsync") < COPIED);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
        assert_int_equal(physical_bytes(0), 0);

        simulator()->set_bandwidth(0);
        asker.stop = false;
        ASSERT_OK(resume_selected(f, &selection, NULL, &error), error);
        assert_filled(address, COPIED * MIB + 5, i);
        assert_int_equal(tms_saver_free(&f->saver, address, &error), TMS_OK);
    }
}

/* The staging memory of a resume from disk is page-locked; what runs on the device is somebody else's. */
static void no_staging_memory_keeps_a_resume_from_stopping(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.stop = true};
    tms_selection_t selection = asking(&asker);
    uint64_t busy = allocate(f, "busy", TMS_BACKUP_NONE, 2 * MIB), address = allocate(f, "a", TMS_BACKUP_DISK, COPIED * MIB);
    const char *const tags[] = {"a"};
    fill(address, COPIED * MIB, 1);
    ASSERT_OK(pause_tag(f, "a", NULL, &error), error);
    CUstream stream = launch_behind_gate(f, GATE, busy);
    copy_slowly(f);
    selection.tags = tags;
    selection.tag_count = 1;
    simulator()->clear_counts();
    assert_int_equal(resume_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
    assert_true(simulator()->calls("cuMemHostRegister") > 0);
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    simulator()->open_gate(GATE);
    simulator()->set_bandwidth(0);
    ASSERT_OK(resume_tag(f, "a", NULL, &error), error);
    assert_filled(address, COPIED * MIB, 1);
    assert_int_equal(tms_saver_free(&f->saver, address, &error), TMS_OK); /* its file stays until then */
    assert_nothing_held(f);
    destroy_stream(f, stream);
}

/* The child has a copy of the call, and nothing of the device's. */
static int32_t fork_when_asked(void *context) {
    asker_t *asker = context;
    if (asker->asked++ > 0) return false;
    pid_t child = fork();
    if (child == 0) {
        simulator()->clear_counts();
        return false;
    }
    int ended = -1;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    return false;
}

static void a_child_of_a_copy_calls_no_driver(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f};
    tms_selection_t selection = {.interrupted = fork_when_asked, .interrupt_context = &asker};
    uint64_t address = allocate(f, "a", TMS_BACKUP_MMAP, COPIED * MIB);
    fill(address, COPIED * MIB, 1);
    pid_t parent = getpid();
    copy_slowly(f);
    tms_status_t status = pause_selected(f, &selection, NULL, &error);
    if (getpid() != parent) {
        uint64_t calls = simulator()->calls("cuStreamSynchronize") + simulator()->calls("cuStreamDestroy") +
                         simulator()->calls("cuCtxPopCurrent") + simulator()->calls("cuDevicePrimaryCtxRelease");
        end_child(status != TMS_FORKED ? 1 : calls != 0 ? 2 : 0);
    }
    ASSERT_OK(status, error);
    assert_true(asker.asked >= 1);
    simulator()->set_bandwidth(0);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled(address, COPIED * MIB, 1);
}

/* ---- what others do meanwhile ---- */

/* A second device comes into use, and somebody looks for peers, while the segment is in transition. */
static int32_t use_second_device(void *context) {
    asker_t *asker = context;
    CUcontext primary;
    if (asker->asked++ > 0) return asker->stop;
    asker->results[0] =
        (tms_status_t)asker->fixture->cuda->cuDevicePrimaryCtxRetain(&primary, asker->fixture->topology->device[1].handle);
    asker->results[1] = tms_saver_refresh_peers(&asker->fixture->saver, &asker->error);
    return asker->stop;
}

static void a_device_that_comes_into_use_meanwhile_gets_access(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .stop = true};
    tms_selection_t selection = {.interrupted = use_second_device, .interrupt_context = &asker};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_segment_of(tms_registry_find(&f->saver.registry, address))->accessible, 1);
    CUstream stream = launch_behind_gate(f, GATE, address);
    assert_int_equal(pause_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
    assert_int_equal(asker.results[0], CUDA_SUCCESS);
    assert_int_equal(asker.results[1], TMS_OK);
    simulator()->open_gate(GATE);
    assert_int_equal(tms_segment_of(tms_registry_find(&f->saver.registry, address))->accessible, 3);
    destroy_stream(f, stream);
}

/* The same, and nobody looks for peers before the call has ended. */
static int32_t only_use_second_device(void *context) {
    asker_t *asker = context;
    CUcontext primary;
    if (asker->asked++ > 0) return 0;
    asker->results[0] =
        (tms_status_t)asker->fixture->cuda->cuDevicePrimaryCtxRetain(&primary, asker->fixture->topology->device[1].handle);
    return 0;
}

static void a_resume_looks_for_peers_once_more_when_it_ends(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f};
    tms_selection_t selection = {.interrupted = only_use_second_device, .interrupt_context = &asker};
    uint64_t address = allocate(f, "a", TMS_BACKUP_MMAP, COPIED * MIB);
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    copy_slowly(f);
    ASSERT_OK(resume_selected(f, &selection, NULL, &error), error);
    simulator()->set_bandwidth(0);
    assert_true(asker.asked >= 1);
    assert_int_equal(asker.results[0], CUDA_SUCCESS);
    assert_int_equal(tms_segment_of(tms_registry_find(&f->saver.registry, address))->accessible, 3);
}

static void a_device_that_comes_into_use_during_a_resume_gets_access(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f};
    tms_selection_t selection = {.interrupted = use_second_device, .interrupt_context = &asker};
    uint64_t address = allocate(f, "a", TMS_BACKUP_MMAP, COPIED * MIB);
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    copy_slowly(f);
    ASSERT_OK(resume_selected(f, &selection, NULL, &error), error);
    simulator()->set_bandwidth(0);
    assert_true(asker.asked >= 1);
    assert_int_equal(tms_segment_of(tms_registry_find(&f->saver.registry, address))->accessible, 3);
}

/* Small allocations share chunks: an event for each 4 MiB, and none at all where nobody is asked. */
static void copies_wait_no_more_than_they_must(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.stop = false};
    tms_selection_t selection = asking(&asker);
    enum { COUNT = 16 };
    uint64_t addresses[COUNT];
    f->saver.stores.copy_chunk_bytes = 4 * MIB;
    for (uint32_t i = 0; i < COUNT; i++) fill(addresses[i] = allocate(f, "a", TMS_BACKUP_PINNED, MIB), MIB, i);
    simulator()->clear_counts();
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync"), COUNT);
    assert_int_equal(simulator()->calls("cuEventRecord"), 4);
    assert_int_equal(simulator()->calls("cuEventCreate"), 2);
    assert_int_equal(simulator()->calls("cuEventDestroy"), 2);
    assert_int_equal(simulator()->calls("cuEventSynchronize"), 3);
    ASSERT_OK(resume_selected(f, &selection, NULL, &error), error);
    for (uint32_t i = 0; i < COUNT; i++) assert_filled(addresses[i], MIB, i);

    simulator()->clear_counts();
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_int_equal(simulator()->calls("cuEventCreate"), 0);
    assert_int_equal(simulator()->calls("cuEventRecord"), 0);
    for (uint32_t i = 0; i < COUNT; i++) assert_filled(addresses[i], MIB, i);
}

/* The failure is what the call reports, although a device before it in order has only been stopped. */
static void a_failure_on_one_device_stops_the_others(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t addresses[] = {allocate_on(f, 0, "a", TMS_BACKUP_NONE, 2 * MIB),
                            allocate_on(f, 1, "a", TMS_BACKUP_PINNED, COPIED * MIB),
                            allocate_on(f, 2, "a", TMS_BACKUP_NONE, 2 * MIB)};
    fill(addresses[1], COPIED * MIB, 1);
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    assert_int_equal(simulator()->take_memory(2, (int64_t)(256 * MIB)), 0);
    copy_slowly(f);
    simulator()->set_bandwidth(4 * MIB); /* two seconds, for the threads of the others to begin meanwhile */
    simulator()->clear_counts();
    assert_int_equal(resume_tag(f, NULL, NULL, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(error.device, 2);
    assert_true(simulator()->calls("cuMemcpyHtoDAsync") < COPIED);
    simulator()->set_bandwidth(0);
    assert_states(f, addresses, 3, TMS_SEGMENT_PAUSED);
    assert_int_equal(simulator()->take_memory(2, -(int64_t)(256 * MIB)), 0);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled(addresses[1], COPIED * MIB, 1);
}

static void a_failure_in_the_middle_of_chunks_undoes_everything(void **state) {
    fixture_t *f = *state;
    asker_t asker = {.stop = false};
    tms_selection_t selection = asking(&asker);
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, COPIED * MIB);
    const char *const calls[] = {"cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyDtoHAsync"};
    fill(address, COPIED * MIB, 1);
    f->saver.stores.copy_chunk_bytes = MIB;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        simulator()->fail_after(calls[i], 1, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_selected(f, &selection, NULL, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        assert_filled(address, COPIED * MIB, 1);
        assert_nothing_held(f);
    }
}

/* ---- while it waits for memory ---- */

static void a_resume_that_waits_for_memory_stops(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .stop = true, .nested = true};
    tms_selection_t selection = asking(&asker);
    selection.timeout_seconds = INFINITY;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB);
    fill(address, 40 * MIB, 1);
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    assert_int_equal(simulator()->take_memory(0, (int64_t)(230 * MIB)), 0);
    assert_int_equal(resume_selected(f, &selection, NULL, &error), TMS_INTERRUPTED);
    assert_int_equal(asker.results[0], TMS_INVALID_STATE); /* also while the turn is somebody else's */
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    assert_int_equal(physical_bytes(0), 0);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(230 * MIB)), 0);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled(address, 40 * MIB, 1);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_that_waits_for_the_gpu_stops),
        ONE(a_pause_that_is_only_asked_goes_on),
        ONE(calls_from_inside_are_refused),
        ONE(a_free_from_inside_is_finished_at_the_end),
        ONE(a_call_that_waits_for_its_turn_stops),
        ONE(a_copy_stops_between_chunks),
        ONE(copies_wait_no_more_than_they_must),
        cmocka_unit_test_setup_teardown(a_failure_on_one_device_stops_the_others, setup_three_devices, teardown),
        ONE(a_failure_in_the_middle_of_chunks_undoes_everything),
        ONE(a_resume_that_waits_for_memory_stops),
        ONE(no_free_keeps_a_call_from_stopping),
        ONE(no_refused_host_memory_keeps_a_call_from_stopping),
        ONE(no_staging_memory_keeps_a_resume_from_stopping),
        ONE(a_child_of_a_copy_calls_no_driver),
        TWO(a_device_that_comes_into_use_meanwhile_gets_access),
        TWO(a_device_that_comes_into_use_during_a_resume_gets_access),
        TWO(a_resume_looks_for_peers_once_more_when_it_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
