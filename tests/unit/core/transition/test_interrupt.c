/* Guards cancellation of a call, wherever it waits: everything is as before, and the same call can be repeated. */
#include "support/interrupt_fixture.h"

static void assert_states(fixture_t *f, const uint64_t *addresses, size_t count, tms_segment_state_t expected) {
    for (size_t i = 0; i < count; i++) assert_int_equal(state_of(f, addresses[i]), expected);
}

/* ---- while it waits for the devices ---- */

static void a_pause_that_waits_for_the_gpu_can_be_cancelled(void **state) {
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
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
    /* On a GPU these two would have waited for the work, and could not have been cancelled. */
    assert_int_equal(simulator()->calls("cuMemHostRegister"), 0);
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
    assert_string_equal(error.operation, "pause");
    assert_false(tms_turn_is_inside());
    assert_states(f, addresses, 4, TMS_SEGMENT_ACTIVE);
    assert_int_equal(physical_bytes(0), 8 * MIB);
    assert_nothing_held(f);
    for (uint32_t i = 0; i < 4; i++) assert_filled(addresses[i], 2 * MIB, i);

    simulator()->open_gate(GATE);
    asker.stop = false;
    ASSERT_OK(pause_selected_with_report(f, &selection, &report, &error), error);
    assert_int_equal(report.allocations, 4);
    assert_int_equal(physical_bytes(0), 0);
    ASSERT_OK(resume_selected_with_report(f, &selection, &report, &error), error);
    for (uint32_t i = 0; i < 3; i++) assert_filled(addresses[i], 2 * MIB, i);
    destroy_stream(f, stream);
}

static void a_pause_whose_callback_does_not_cancel_continues(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.gate = GATE};
    tms_selection_t selection = asking(&asker);
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 1);
    uint8_t before = *(uint8_t *)address;
    CUstream stream = launch_behind_gate(f, GATE, address);
    ASSERT_OK(pause_selected(f, &selection, &error), error); /* the callback opens the gate */
    assert_true(asker.asked >= 1);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(*(uint8_t *)address, (uint8_t)(before + 1)); /* the backup was made after the work */
    destroy_stream(f, stream);
}

/* ---- what a callback may do ---- */

static void calls_from_a_callback_are_refused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .nested = true, .gate = GATE};
    tms_selection_t selection = asking(&asker);
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, address);
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_true(asker.asked >= 1);
    assert_int_equal(asker.results[0], TMS_INVALID_STATE);
    assert_int_equal(asker.results[1], TMS_INVALID_STATE);
    assert_non_null(strstr(asker.error.message, "signal handlers"));
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    assert_false(tms_turn_is_inside());
    destroy_stream(f, stream);
}

static void a_free_from_a_callback_is_finished_at_the_end(void **state) {
    for (int stop = 0; stop < 2; stop++) {
        fixture_t *f = *state;
        tms_error_t error;
        int gate = GATE + stop;
        uint64_t kept = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), freed = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
        CUstream stream = launch_behind_gate(f, gate, kept);
        asker_t asker = {.fixture = f, .address = freed, .gate = gate, .stop = stop};
        tms_selection_t selection = asking(&asker);
        assert_int_equal(pause_selected(f, &selection, &error), stop ? TMS_INTERRUPTED : TMS_OK);
        assert_int_equal(asker.results[0], TMS_OK);
        assert_false(is_managed(f, freed));
        /* A cancelled call does not wait for the device; the next call frees the memory. */
        assert_int_equal(physical_bytes(0), stop ? 4 * MIB : 0);
        asker.stop = false;
        ASSERT_OK(pause_selected(f, &selection, &error), error);
        assert_int_equal(physical_bytes(0), 0);
        assert_int_equal(tms_free_address(&f->saver, kept, &error), TMS_OK);
        destroy_stream(f, stream);
    }
}

/* ---- while it waits for its turn ---- */

static void a_call_that_waits_for_its_turn_can_be_cancelled(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    held_pause_t other;
    uint64_t held = allocate(f, "held", TMS_BACKUP_NONE, 2 * MIB), mine = allocate(f, "mine", TMS_BACKUP_NONE, 2 * MIB);
    fill(mine, 2 * MIB, 1);
    CUstream stream = launch_behind_gate(f, GATE, held);
    begin_pause(&other, f, "held");

    asker_t asker = {.stop = true};
    tms_selection_t selection = asking(&asker);
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
    assert_int_equal(asker.asked, 1);
    asker = (asker_t){.stop = true};
    assert_int_equal(resume_selected(f, &selection, &error), TMS_INTERRUPTED);
    assert_int_equal(state_of(f, mine), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, held), TMS_SEGMENT_PAUSING);

    asker = (asker_t){.gate = GATE}; /* and one that continues gets the turn after the other */
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    join_pause(&other);
    assert_int_equal(physical_bytes(0), 0);
    destroy_stream(f, stream);
}

/* ---- while it copies ---- */

static void a_copy_is_cancelled_between_chunks(void **state) {
    fixture_t *f = *state;
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK, HEAP_BACKUP};
    for (uint32_t i = 0; i < 4; i++) {
        tms_error_t error;
        uint64_t address = allocate(f, "a", kinds[i], COPIED * MIB + 5);
        asker_t asker = {.after = "cuMemcpyDtoHAsync", .stop = true};
        tms_selection_t selection = asking(&asker);
        fill(address, COPIED * MIB + 5, i);
        copy_slowly(f, MIB);
        simulator()->clear_counts();
        assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
        assert_true(simulator()->calls("cuMemcpyDtoHAsync") < COPIED);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        assert_filled(address, COPIED * MIB + 5, i);
        assert_nothing_held(f);

        release_copies();
        asker.stop = false;
        ASSERT_OK(pause_selected(f, &selection, &error), error);
        copy_slowly(f, MIB);
        asker = (asker_t){.after = "cuMemcpyHtoDAsync", .stop = true};
        simulator()->clear_counts();
        assert_int_equal(resume_selected(f, &selection, &error), TMS_INTERRUPTED);
        assert_true(simulator()->calls("cuMemcpyHtoDAsync") < COPIED);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
        assert_int_equal(physical_bytes(0), 0);

        release_copies();
        asker.stop = false;
        ASSERT_OK(resume_selected(f, &selection, &error), error);
        assert_filled(address, COPIED * MIB + 5, i);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

/* Unpinning would wait for all work of the devices. The thread of the call copies for one device, another thread for the
 * second. */
static void a_cancelled_call_unpins_no_staging_memory(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.after = "cuMemcpyDtoHAsync", .stop = true};
    const tms_selection_t selection = asking(&asker);
    const uint64_t addresses[] = {allocate_on(f, 0, "a", TMS_BACKUP_DISK, COPIED * MIB),
                                  allocate_on(f, 1, "a", TMS_BACKUP_DISK, COPIED * MIB)};
    copy_slowly(f, TMS_DISK_BLOCK_BYTES);
    simulator()->clear_counts();
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
    assert_true(simulator()->calls("cuMemHostRegister") > 0);
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
    release_copies();
    assert_states(f, addresses, 2, TMS_SEGMENT_ACTIVE);
    assert_nothing_held(f);
}

/* ---- what others do meanwhile ---- */

/* Small allocations share chunks: an event for each 4 MiB, and none at all without a callback. */
static void copies_wait_no_more_than_they_must(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.stop = false};
    tms_selection_t selection = asking(&asker);
    enum { COUNT = 16 };
    uint64_t addresses[COUNT];
    f->saver.stores.copying.chunk_bytes = 4 * MIB;
    for (uint32_t i = 0; i < COUNT; i++) fill(addresses[i] = allocate(f, "a", TMS_BACKUP_PINNED, MIB), MIB, i);
    simulator()->clear_counts();
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync"), COUNT);
    assert_int_equal(simulator()->calls("cuEventRecord"), 4);
    assert_int_equal(simulator()->calls("cuEventCreate"), 2);
    assert_int_equal(simulator()->calls("cuEventDestroy"), 2);
    assert_int_equal(simulator()->calls("cuEventSynchronize"), 3);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    for (uint32_t i = 0; i < COUNT; i++) assert_filled(addresses[i], MIB, i);

    simulator()->clear_counts();
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuEventCreate"), 0);
    assert_int_equal(simulator()->calls("cuEventRecord"), 0);
    for (uint32_t i = 0; i < COUNT; i++) assert_filled(addresses[i], MIB, i);
}

/* The call reports the failure, although a device before it in order has only been cancelled. Uncancelled, that device would
 * copy for half a minute. What it copied with is released: nothing of it has failed. */
static void check_failure_on_one_device(fixture_t *f, tms_backup_kind_t kind, uint64_t chunk_bytes) {
    tms_error_t error;
    uint64_t addresses[] = {allocate_on(f, 0, "a", TMS_BACKUP_NONE, 2 * MIB), allocate_on(f, 1, "a", kind, COPIED * MIB),
                            allocate_on(f, 2, "a", TMS_BACKUP_NONE, 2 * MIB)};
    fill(addresses[1], COPIED * MIB, 1);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->take_memory(2, (int64_t)(256 * MIB)), 0);
    copy_slowly(f, chunk_bytes);
    simulator()->clear_counts();
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(error.device, 2);
    assert_true(simulator()->calls("cuMemcpyHtoDAsync") < COPIED * MIB / chunk_bytes);
    release_copies();
    assert_nothing_waits(&f->saver);
    assert_states(f, addresses, 3, TMS_SEGMENT_PAUSED);
    assert_int_equal(simulator()->take_memory(2, -(int64_t)(256 * MIB)), 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(addresses[1], COPIED * MIB, 1);
}

static void a_failure_on_one_device_cancels_the_others(void **state) {
    check_failure_on_one_device(*state, TMS_BACKUP_PINNED, 16 << 10);
}

static void a_failure_on_one_device_cancels_the_disk_copies_of_others(void **state) {
    check_failure_on_one_device(*state, TMS_BACKUP_DISK, TMS_DISK_BLOCK_BYTES);
}

static void a_failure_in_the_middle_of_chunks_undoes_everything(void **state) {
    fixture_t *f = *state;
    asker_t asker = {.stop = false};
    tms_selection_t selection = asking(&asker);
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, COPIED * MIB);
    const char *const calls[] = {"cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyDtoHAsync"};
    fill(address, COPIED * MIB, 1);
    f->saver.stores.copying.chunk_bytes = MIB;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        simulator()->fail_after(calls[i], 1, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_selected(f, &selection, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        assert_filled(address, COPIED * MIB, 1);
        assert_nothing_held(f);
    }
}

/* ---- while it waits for memory ---- */

static void a_resume_that_waits_for_memory_can_be_cancelled(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .stop = true, .nested = true};
    tms_selection_t selection = asking(&asker);
    selection.timeout_seconds = INFINITY;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB);
    fill(address, 40 * MIB, 1);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->take_memory(0, (int64_t)(230 * MIB)), 0);
    assert_int_equal(resume_selected(f, &selection, &error), TMS_INTERRUPTED);
    assert_int_equal(asker.results[0], TMS_INVALID_STATE); /* also while another call has the turn */
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    assert_int_equal(physical_bytes(0), 0);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(230 * MIB)), 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, 40 * MIB, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_that_waits_for_the_gpu_can_be_cancelled),
        ONE(a_pause_whose_callback_does_not_cancel_continues),
        ONE(calls_from_a_callback_are_refused),
        ONE(a_free_from_a_callback_is_finished_at_the_end),
        ONE(a_call_that_waits_for_its_turn_can_be_cancelled),
        ONE(a_copy_is_cancelled_between_chunks),
        TWO(a_cancelled_call_unpins_no_staging_memory),
        ONE(copies_wait_no_more_than_they_must),
        cmocka_unit_test_setup_teardown(a_failure_on_one_device_cancels_the_others, setup_three_devices, teardown),
        cmocka_unit_test_setup_teardown(a_failure_on_one_device_cancels_the_disk_copies_of_others, setup_three_devices,
                                        teardown),
        ONE(a_failure_in_the_middle_of_chunks_undoes_everything),
        ONE(a_resume_that_waits_for_memory_can_be_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
