/* Guards observers.c and where it is called: the events of pauses and resumes, of failures, and of several devices; and that
 * only samples of the free memory add driver calls. */
#include <stdio.h>
#include <string.h>

#include "core/model/inspect.h"
#include "core/transition/guard_bytes.h"
#include "support.h"

enum { ROOM = 128, GATE = 1, LONG_SECONDS = 600 };

static tms_event_t events[ROOM];
static uint64_t seen; /* events of this test that were looked at */

static int one_device(void **state) {
    seen = 0;
    return setup_one_device(state);
}

static int two_devices(void **state) {
    seen = 0;
    return setup_two_devices(state);
}

/* The events since the last call of this function, in `events`; returns their number. */
static size_t new_events(fixture_t *f) {
    tms_events_copy_t copy = {.events = events, .event_room = ROOM};
    tms_inspect_copy_events(&f->saver, &copy);
    size_t count = (size_t)(copy.recorded - seen);
    assert_true(count <= copy.event_count);
    memmove(events, events + copy.event_count - count, count * sizeof *events);
    seen = copy.recorded;
    return count;
}

static const char *const kinds[] = {
#define NAME(kind, number, name) [number] = (name),
    TMS_EVENT_KINDS(NAME)
#undef NAME
};
static const char *const phases[] = {
#define NAME(phase, number, name) [number] = (name),
    TMS_EVENT_PHASES(NAME)
#undef NAME
};

/* The new events as "begin turn synchronize(0x7) move:kv@0": failures with their status, devices after @. */
static const char *told(fixture_t *f) {
    static char text[4096];
    size_t count = new_events(f), length = 0;
    text[0] = '\0';
    for (size_t i = 0; i < count; i++) {
        const tms_event_t *event = &events[i];
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%s", i ? " " : "",
                                   event->kind == TMS_EVENT_PHASE ? phases[event->phase] : kinds[event->kind]);
        if (event->tag) length += (size_t)snprintf(text + length, sizeof text - length, ":%s", event->tag);
        if (event->device >= 0) length += (size_t)snprintf(text + length, sizeof text - length, "@%d", event->device);
        if (event->status) length += (size_t)snprintf(text + length, sizeof text - length, "!%d", event->status);
    }
    return text;
}

static const tms_event_t *find_kind(size_t count, tms_event_kind_t kind, tms_event_phase_t phase, int device) {
    for (size_t i = 0; i < count; i++) {
        if (events[i].kind == (int32_t)kind && events[i].phase == (int32_t)phase && events[i].device == device)
            return &events[i];
    }
    fail_msg("no %s %s of device %d", kinds[kind], phases[phase], device);
    return NULL;
}

static void plain_calls(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 3 * MIB);
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 1 * MIB);
    assert_string_equal(told(f), "allocate:kv@0 allocate:kv@0");
    assert_int_equal(events[0].address, address);
    assert_int_equal(events[0].bytes, 3 * MIB);
    assert_int_equal(events[0].change.resident_bytes, 4 * MIB);
    ASSERT_OK(pause_tag(f, "kv", &error), error);
    assert_string_equal(told(f), "begin turn synchronize plan unmap move:kv@0 end");
    const tms_event_t *end = &events[6], *move = &events[5];
    assert_int_equal(end->allocations, 2);
    assert_int_equal(end->bytes, 6 * MIB);
    assert_string_equal(end->operation, "pause");
    assert_int_equal(move->allocations, 2);
    assert_true(move->change.resident_bytes == 0 - 6 * MIB);
    assert_int_equal(move->change.paused_bytes, 6 * MIB);
    for (int i = 0; i < 7; i++) {
        assert_int_equal(events[i].call, 1);
        assert_true(end->began <= events[i].began && events[i].ended <= end->ended);
        if (i > 0) assert_true(events[i - 1].ended <= events[i].ended);
    }
    for (int i = 2; i < 5; i++) assert_true(events[i - 1].ended <= events[i].began); /* one after the other */
    ASSERT_OK(resume_tag(f, "kv", &error), error);
    assert_string_equal(told(f), "begin turn create@0 map@0 discard move:kv@0 end");
    assert_int_equal(events[2].allocations, 2);
    assert_int_equal(events[2].bytes, 6 * MIB);
    assert_int_equal(events[3].bytes, 6 * MIB);
    assert_true(events[2].busy <= events[2].ended - events[2].began);
    assert_true(events[2].began < events[3].began && events[2].ended < events[3].ended); /* they alternate */
    for (int i = 0; i < 7; i++) assert_string_equal(events[i].operation, "resume");
    assert_int_equal(events[6].call, 2);
    ASSERT_OK(resume_tag(f, "kv", &error), error); /* nothing to do */
    assert_string_equal(told(f), "begin turn end");
    ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    assert_string_equal(told(f), "free:kv@0");
    assert_int_equal(events[0].address, address);
    assert_true(events[0].change.resident_bytes == 0 - 4 * MIB);
}

static void contents_are_copied(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_PINNED, 3 * MIB);
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    fill(address, 3 * MIB, 1);
    (void)new_events(f);
    ASSERT_OK(pause_all(f, &error), error);
    size_t count = new_events(f);
    const tms_event_t *copy = find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_COPY, 0);
    const tms_event_t *end = find_kind(count, TMS_EVENT_END, TMS_PHASE_NONE, -1);
    assert_int_equal(copy->bytes, 3 * MIB);
    assert_int_equal(copy->allocations, 1);
    assert_int_equal(end->copied_bytes, 3 * MIB);
    for (size_t i = 0; i < count; i++) {
        if (events[i].kind == TMS_EVENT_MOVE && strcmp(events[i].tag, "weights") == 0)
            assert_true(events[i].change.backup_bytes >= 3 * MIB);
        else
            assert_int_equal(events[i].change.backup_bytes, 0);
    }
    ASSERT_OK(resume_all(f, &error), error);
    count = new_events(f);
    copy = find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_COPY, 0);
    assert_int_equal(copy->bytes, 3 * MIB);
    assert_string_equal(copy->operation, "resume");
    assert_int_equal(find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_MAP, 0)->allocations, 2);
    assert_filled(address, 3 * MIB, 1);
}

static void phases_name_their_device(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    for (int device = 0; device < 2; device++)
        fill(allocate_on(f, device, "weights", TMS_BACKUP_PINNED, (uint64_t)(2 + 2 * device) * MIB), 2 * MIB, 1);
    (void)new_events(f);
    ASSERT_OK(pause_all(f, &error), error);
    size_t count = new_events(f);
    for (int device = 0; device < 2; device++) {
        uint64_t bytes = (uint64_t)(2 + 2 * device) * MIB;
        assert_int_equal(find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_COPY, device)->bytes, bytes);
        assert_int_equal(find_kind(count, TMS_EVENT_MOVE, TMS_PHASE_NONE, device)->change.paused_bytes, bytes);
    }
    assert_true(find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_COPY, 0)->thread !=
                find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_COPY, 1)->thread);
    ASSERT_OK(resume_all(f, &error), error);
    count = new_events(f);
    for (int device = 0; device < 2; device++) {
        uint64_t bytes = (uint64_t)(2 + 2 * device) * MIB;
        assert_int_equal(find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_CREATE, device)->bytes, bytes);
        assert_int_equal(find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_MAP, device)->bytes, bytes);
        assert_int_equal(find_kind(count, TMS_EVENT_PHASE, TMS_PHASE_COPY, device)->bytes, bytes);
    }
}

static void the_wait_of_a_count_is_a_phase(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t count = 0;
    const uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    const tms_selection_t selection = {0};
    const tms_live_range_t range = {address, address + MIB};
    (void)new_events(f);
    ASSERT_OK(tms_guard_bytes_count(&f->saver, &selection, &range, 1, &count, &error), error);
    assert_int_not_equal(count, TMS_NOT_RESIDENT);
    assert_string_equal(told(f), "begin turn synchronize end");
}

/* ---- failures ---- */

static void failures_are_events(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t none = 0;
    tms_region_t region = {.managed = true};
    ASSERT_OK(tms_tag_intern(&f->regions.tags, "large", &region.tag, &error), error);
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    (void)new_events(f);
    assert_int_equal(tms_allocation_create(&f->saver, &region, GIB, 0, &none, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(told(f), "allocate:large@0!4");
    assert_int_equal(events[0].bytes, GIB);
    assert_int_equal(events[0].change.resident_bytes, 0);

    simulator()->fail_after("cuCtxSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_string_equal(told(f), "begin turn synchronize!7 end!7");
    assert_int_equal(events[3].driver_result, CUDA_ERROR_UNKNOWN);

    ASSERT_OK(pause_all(f, &error), error);
    (void)new_events(f);
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(told(f), "begin turn create@0!4 unmap end!4"); /* nothing has moved */
    assert_int_equal(events[4].driver_result, CUDA_ERROR_OUT_OF_MEMORY);
    simulator()->fail_after("cuMemMap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    assert_string_equal(told(f), "begin turn create@0 map@0!7 unmap end!7");
    ASSERT_OK(resume_all(f, &error), error);
}

static void damage_and_repair(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    (void)new_events(f);
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_string_equal(told(f), "begin turn synchronize plan unmap!7 end!7"); /* it stays resident */
    ASSERT_OK(pause_all(f, &error), error);                                    /* tries again, and fails */
    assert_string_equal(told(f), "begin turn repair:kv@0!7 end");
    assert_int_equal(events[2].driver_result, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(pause_all(f, &error), error);
    assert_string_equal(told(f), "begin turn repair:kv@0 end");
    assert_true(events[2].change.resident_bytes == 0 - 2 * MIB);
    assert_int_equal(events[2].change.paused_bytes, 2 * MIB);
}

/* For `interrupted`: gives back what the test took, once the first attempt has failed. */
static int32_t make_room(void *taken) {
    int64_t *bytes = taken;
    if (simulator()->calls("cuMemCreate") > 0 && *bytes > 0) {
        assert_int_equal(simulator()->take_memory(0, -*bytes), 0);
        *bytes = 0;
    }
    return 0;
}

static void a_wait_for_memory_is_a_phase(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    int64_t taken = (int64_t)(200 * MIB);
    const tms_selection_t selection = {
        .interrupted = make_room, .interrupt_context = &taken, .timeout_seconds = LONG_SECONDS};
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 128 * MIB);
    ASSERT_OK(pause_tag(f, "kv", &error), error);
    assert_int_equal(simulator()->take_memory(0, taken), 0);
    (void)new_events(f);
    simulator()->clear_counts();
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_string_equal(told(f), "begin turn create@0!4 unmap wait turn create@0 map@0 discard move:kv@0 end");
}

/* ---- other threads ---- */

static void events_are_read_during_a_pause(void **state) {
    fixture_t *f = *state;
    held_pause_t held;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    (void)new_events(f);
    CUstream stream = launch_behind_gate(f, GATE, address);
    begin_pause(&held, f, "kv");
    assert_string_equal(told(f), "begin turn");
    tms_error_t error;
    ASSERT_OK(tms_free_address(&f->saver, address, &error), error); /* the pause finishes it */
    simulator()->open_gate(GATE);
    join_pause(&held);
    assert_string_equal(told(f), "synchronize plan unmap move:kv@0 free:kv@0 end");
    assert_int_equal(events[3].change.paused_bytes, 2 * MIB);
    assert_true(events[4].change.paused_bytes == 0 - 2 * MIB);
    assert_int_equal(events[4].change.resident_bytes, 0);
    destroy_stream(f, stream);
}

/* ---- cost ---- */

static void cycle(fixture_t *f) {
    tms_error_t error;
    uint64_t kept = allocate(f, "weights", TMS_BACKUP_PINNED, 2 * MIB), dropped = allocate(f, "kv", TMS_BACKUP_NONE, MIB);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    ASSERT_OK(tms_free_address(&f->saver, kept, &error), error);
    ASSERT_OK(tms_free_address(&f->saver, dropped, &error), error);
    settle_host_memory(&f->saver);
}

static void samples_are_asked_for(void **state) {
    fixture_t *f = *state;
    simulator()->clear_counts();
    cycle(f);
    uint64_t plain = simulator()->calls("cuMemGetInfo_v2");
    (void)new_events(f);
    tms_events_set_samples(&f->saver.events, true);
    simulator()->clear_counts();
    cycle(f);
    assert_int_equal(simulator()->calls("cuMemGetInfo_v2"), plain + 4);
    size_t count = new_events(f), samples = 0;
    uint64_t free_bytes[4];
    for (size_t i = 0; i < count; i++) {
        if (events[i].kind != TMS_EVENT_MEMORY) continue;
        assert_int_equal(events[i].total_bytes, 256 * MIB);
        assert_int_equal(events[i].device, 0);
        free_bytes[samples++] = events[i].bytes;
    }
    assert_int_equal(samples, 4);
    assert_int_equal(free_bytes[1] - free_bytes[0], 4 * MIB); /* paused */
    assert_int_equal(free_bytes[2], free_bytes[1]);
    assert_int_equal(free_bytes[3], free_bytes[0]); /* resumed */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(plain_calls, one_device, teardown),
        cmocka_unit_test_setup_teardown(contents_are_copied, one_device, teardown),
        cmocka_unit_test_setup_teardown(phases_name_their_device, two_devices, teardown),
        cmocka_unit_test_setup_teardown(the_wait_of_a_count_is_a_phase, one_device, teardown),
        cmocka_unit_test_setup_teardown(failures_are_events, one_device, teardown),
        cmocka_unit_test_setup_teardown(damage_and_repair, one_device, teardown),
        cmocka_unit_test_setup_teardown(a_wait_for_memory_is_a_phase, one_device, teardown),
        cmocka_unit_test_setup_teardown(events_are_read_during_a_pause, one_device, teardown),
        cmocka_unit_test_setup_teardown(samples_are_asked_for, one_device, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
