/* Guards a resume in the background: its end, streams that wait for its copies, and copies that cannot be undone. */
#include <sys/wait.h>
#include <unistd.h>

#include "captured_stderr.h"
#include "core/transition/resume.h"
#include "support/pending_fixture.h"

/* As in a program whose thread has a context. */
static CUstream enter_and_make_stream(fixture_t *f) {
    const tms_error_context_t context = {.operation = "test", .device = 0};
    CUstream stream = NULL;
    assert_int_equal(tms_devices_enter(&f->devices, 0, &context, NULL), TMS_OK);
    assert_int_equal(f->cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return stream;
}

static void destroy_and_leave(fixture_t *f, CUstream stream) {
    assert_int_equal(f->cuda->cuStreamDestroy(stream), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
}

static void a_pending_resume_ends_like_any_other(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    char tag[] = "weights";
    uint64_t address = paused(f, tag, TMS_BACKUP_PINNED, 1);
    tms_pending_t *pending = begin(f, tag);
    memset(tag, 'x', strlen(tag)); /* the selection was copied */
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, &report, &error), error);
    assert_int_equal(tms_pending_done(pending), 1);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(report.copied_bytes, BYTES);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, BYTES, 1);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, &report, &error), error); /* as often as the caller likes */
    tms_pending_release(pending);
}

static void count_calls(void *context, uint64_t done, uint64_t total) {
    (void)done, (void)total;
    ++*(int *)context;
}

/* The caller may be gone when the background copies. */
static void no_progress_is_reported_in_the_background(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    int calls = 0;
    tms_pending_t *pending = NULL;
    const tms_selection_t selection = {.on_progress = count_calls, .on_progress_context = &calls};
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 20);
    ASSERT_OK(tms_resume_begin(&f->saver, &selection, &pending, &error), error);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_int_equal(calls, 0);
    assert_filled(address, BYTES, 20);
    tms_pending_release(pending);
}

/* The failure is logged once, by the last holder, unless a caller has received it. */
static void a_failure_that_nobody_received_is_logged(void **state) {
    fixture_t *f = *state;
    (void)paused(f, "a", TMS_BACKUP_PINNED, 21);
    for (int received = 0; received < 2; received++) {
        tms_error_t error;
        char text[4096];
        captured_stderr_t captured = capture_begin();
        simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_UNKNOWN);
        tms_pending_t *pending = begin(f, "a");
        ASSERT_OK(tms_pending_await(pending, NULL, NULL, &error), error);
        join_resumes(f); /* the pending resume is released by its thread before that ends */
        const tms_status_t status = received ? tms_pending_wait(pending, NULL, NULL, NULL, &error) : TMS_DRIVER;
        tms_pending_release(pending);
        capture_end(captured, text, sizeof text);
        assert_int_equal(status, TMS_DRIVER);
        assert_int_equal(strstr(text, "no call waited for it") != NULL, !received);
    }
}

/* A child neither waits for a resume of its parent nor releases it. */
static void a_forked_child_has_no_pending_resume(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    int status = -1;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 22);
    hold_copies();
    tms_pending_t *pending = begin(f, "a");
    simulator()->wait_until_synchronizing();
    const pid_t child = fork();
    if (child == 0) {
        const bool done = tms_pending_done(pending) == 1;
        const bool refused = tms_pending_wait(pending, at_once, NULL, NULL, &error) == TMS_FORKED &&
                             tms_pending_wait_stream(pending, NULL, at_once, NULL, &error) == TMS_FORKED;
        for (int i = 0; i < 2; i++) tms_pending_release(pending);
        _exit(done && refused && simulator()->calls_in_child() == 0 ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    release_copies();
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_int_equal(status, 0);
    assert_filled(address, BYTES, 22);
    tms_pending_release(pending);
}

/* Its thread may run long after the call: what it resumes is decided by the call. */
static void a_later_pause_is_left_alone(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    tms_pending_t *pending = NULL;
    const char *tags[] = {"a", "b"};
    const tms_selection_t selection = {.tags = tags, .tag_count = 2};
    const tms_error_context_t context = {.operation = "test", .device = TMS_NO_DEVICE};
    uint64_t before = paused(f, "b", TMS_BACKUP_NONE, 1);
    ASSERT_OK(tms_pending_create(&f->saver, &selection, &pending, &context, &error), error);
    uint64_t later = paused(f, "a", TMS_BACKUP_NONE, 2);
    ASSERT_OK(tms_resume_run_pending(&f->saver, pending, &report, &error), error);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(state_of(f, before), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, later), TMS_SEGMENT_PAUSED);
    tms_pending_end(pending, TMS_OK, &report, &error);
    ASSERT_OK(tms_pending_await(pending, NULL, NULL, &error), error);
    tms_pending_release(pending);
}

static void a_handle_may_be_released_before_the_end(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_MMAP, 2);
    hold_copies();
    tms_pending_release(begin(f, "a"));
    tms_pending_release(NULL);
    simulator()->wait_until_synchronizing(); /* for its copies: it has the turn */
    release_copies();
    /* Another call waits for its turn, and finds it completed. */
    ASSERT_OK(resume_tag(f, "a", &error), error);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, BYTES, 2);
    join_resumes(f);
}

/* The stream's work adds 1 to the copied bytes: it must run after the copies. */
static void a_stream_waits_for_the_copies_and_the_caller_does_not(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 3);
    CUstream stream = enter_and_make_stream(f);
    hold_copies();
    tms_pending_t *pending = begin(f, "a");
    simulator()->clear_counts();
    ASSERT_OK(tms_pending_wait_stream(pending, stream, NULL, NULL, &error), error);
    assert_int_equal(simulator()->calls("cuStreamWaitEvent"), 1);
    simulator()->open_gate(GATE);
    assert_int_equal(simulator()->launch_add(stream, address, MIB, 1, GATE), 0);
    release_copies();
    assert_int_equal(f->cuda->cuStreamSynchronize(stream), CUDA_SUCCESS);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    uint8_t *bytes = (uint8_t *)address;
    for (uint64_t i = 0; i < MIB; i++) bytes[i]--;
    assert_filled(address, BYTES, 3);
    ASSERT_OK(tms_pending_wait_stream(pending, stream, NULL, NULL, &error), error); /* ended: nothing to wait for */
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

static void a_failure_is_reported_by_wait_and_undone(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemCreate", "cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord", "cuStreamSynchronize"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 4);
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        tms_pending_t *pending = begin(f, "a");
        assert_int_equal(tms_pending_wait(pending, NULL, NULL, NULL, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_int_equal(tms_pending_wait_stream(pending, NULL, NULL, NULL, &error), TMS_DRIVER);
        tms_pending_release(pending);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
        assert_int_equal(physical_bytes(0), 0);
        ASSERT_OK(resume_tag(f, "a", &error), error);
        assert_filled(address, BYTES, 4);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

static void copies_that_a_stream_waits_for_are_not_undone(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 5);
    CUstream stream = enter_and_make_stream(f);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    hold_copies();
    /* The wait for the copies fails. Before it gives up, the call waits once more: that wait lasts until the release. */
    simulator()->fail_after("cuStreamSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    tms_pending_t *pending = begin(f, "a");
    simulator()->wait_until_synchronizing();
    assert_int_equal(simulator()->failures_fired(), 1);
    ASSERT_OK(tms_pending_wait_stream(pending, stream, NULL, NULL, &error), error);
    release_copies();
    assert_int_equal(tms_pending_wait(pending, NULL, NULL, NULL, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuStreamSynchronize");
    assert_int_equal(state_of(f, address), TMS_SEGMENT_DAMAGED);
    assert_true(physical_bytes(0) > 0);           /* kernels may be using it */
    ASSERT_OK(resume_tag(f, "a", &error), error); /* repairs it, and brings the contents back */
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, BYTES, 5);
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

/* Keeps a resume with a timeout waiting until its callback runs. */
typedef struct hoard {
    int device;
    int64_t bytes;
} hoard_t;

static hoard_t take_all_but(int device, uint64_t left) {
    tms_sim_usage_t usage;
    simulator()->usage(device, &usage);
    hoard_t hoard = {.device = device, .bytes = (int64_t)(256 * MIB - usage.physical_bytes - left)};
    assert_int_equal(simulator()->take_memory(device, hoard.bytes), 0);
    return hoard;
}

/* As `interrupted`: called only by a call that waits. */
static int32_t give_it_back(void *context) {
    hoard_t *hoard = context;
    if (hoard->bytes > 0) assert_int_equal(simulator()->take_memory(hoard->device, -hoard->bytes), 0);
    hoard->bytes = 0;
    return 0;
}

/* Enough work for the driver to be busy when the stream is to wait. */
enum { MANY = 24 };

/* Paused, without contents, and with memory for all but the last of them. */
static hoard_t pause_many(fixture_t *f, int device, uint64_t addresses[MANY]) {
    tms_error_t error;
    for (int i = 0; i < MANY; i++) addresses[i] = allocate_on(f, device, "cache", TMS_BACKUP_NONE, BYTES);
    ASSERT_OK(pause_tag(f, "cache", &error), error);
    return take_all_but(device, (MANY - 1) * BYTES);
}

/* A kernel on the stream uses memory without copies: all of it must be mapped. */
static void a_stream_waits_for_memory_without_contents(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_pending_t *pending = NULL;
    uint64_t addresses[MANY];
    const tms_selection_t patient = {.timeout_seconds = 3600};
    CUstream stream = enter_and_make_stream(f);
    hoard_t hoard = pause_many(f, 0, addresses);
    ASSERT_OK(tms_resume_begin(&f->saver, &patient, &pending, &error), error);
    ASSERT_OK(tms_pending_wait_stream(pending, stream, give_it_back, &hoard, &error), error);
    for (int i = 0; i < MANY; i++) assert_int_equal(simulator()->launch_add(stream, addresses[i], MIB, 1, 0), 0);
    assert_int_equal(f->cuda->cuStreamSynchronize(stream), CUDA_SUCCESS);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_int_equal(simulator()->calls("cuStreamWaitEvent"), 0); /* nothing is copied: nothing to wait for */
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

/* Zeroing is a copy like any other; every stream that requests it waits. */
static void several_streams_wait_for_zeros(void **state) {
    fixture_t *f = *state;
    enum { STREAMS = 2 };
    tms_error_t error;
    tms_pending_t *pending = NULL;
    CUstream streams[STREAMS];
    uint64_t address = paused(f, "a", TMS_BACKUP_NONE, 16), filled = paused(f, "a", TMS_BACKUP_PINNED, 17);
    const tms_selection_t zeroing = {.zero = 1};
    for (int i = 0; i < STREAMS; i++) streams[i] = enter_and_make_stream(f);
    hold_copies();
    ASSERT_OK(tms_resume_begin(&f->saver, &zeroing, &pending, &error), error);
    simulator()->clear_counts();
    for (int i = 0; i < STREAMS; i++) {
        ASSERT_OK(tms_pending_wait_stream(pending, streams[i], NULL, NULL, &error), error);
        assert_int_equal(simulator()->launch_add(streams[i], address + (uint64_t)i * MIB, MIB, 1, 0), 0);
    }
    assert_int_equal(simulator()->calls("cuStreamWaitEvent"), STREAMS);
    release_copies();
    for (int i = 0; i < STREAMS; i++) assert_int_equal(f->cuda->cuStreamSynchronize(streams[i]), CUDA_SUCCESS);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    for (uint64_t i = 0; i < BYTES; i++) assert_int_equal(((uint8_t *)address)[i], i < STREAMS * MIB);
    assert_filled(filled, BYTES, 17);
    tms_pending_release(pending);
    for (int i = STREAMS - 1; i >= 0; i--) destroy_and_leave(f, streams[i]);
}

/* The first device's copies are queued long before the second gets memory. */
static void a_stream_waits_for_every_device(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_pending_t *pending = NULL;
    const tms_selection_t patient = {.timeout_seconds = 3600};
    uint64_t filled = paused(f, "a", TMS_BACKUP_PINNED, 10), empty[MANY];
    simulator()->set_poison_limit(MANY * BYTES); /* a resume may back all of them by one run */
    CUstream stream = enter_and_make_stream(f);
    hoard_t hoard = pause_many(f, 1, empty);
    ASSERT_OK(tms_resume_begin(&f->saver, &patient, &pending, &error), error);
    ASSERT_OK(tms_pending_wait_stream(pending, stream, give_it_back, &hoard, &error), error);
    assert_int_equal(physical_bytes(1), MANY * BYTES);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_filled(filled, BYTES, 10);
    assert_poisoned(empty[MANY - 1], BYTES);
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

/* The copies of a resume are held until it has done all else. */
typedef struct rest {
    uint64_t bytes; /* that the second device gets, besides */
    int polls;      /* since then */
} rest_t;

/* As `interrupted` of wait_stream(), which looks between the two polls once more whether the stream may wait. */
static int32_t release_after_the_rest(void *context) {
    rest_t *rest = context;
    const bool done = simulator()->calls("cuStreamSynchronize") > 0 && physical_bytes(1) == rest->bytes;
    if (done && ++rest->polls == 2) release_copies();
    return 0;
}

/* One device has copies in flight when the other finds too little memory. */
static void out_of_memory_is_undone_although_a_stream_is_to_wait(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_pending_t *pending = NULL;
    const tms_selection_t all = {0};
    uint64_t filled = paused(f, "a", TMS_BACKUP_PINNED, 11), empty[MANY];
    CUstream stream = enter_and_make_stream(f);
    hoard_t hoard = pause_many(f, 1, empty);
    rest_t rest = {.bytes = (MANY - 1) * BYTES}; /* none is left for the last allocation */
    hold_copies();
    simulator()->clear_counts();
    ASSERT_OK(tms_resume_begin(&f->saver, &all, &pending, &error), error);
    tms_status_t status = tms_pending_wait_stream(pending, stream, release_after_the_rest, &rest, &error);
    release_copies();
    assert_int_equal(status, TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(tms_pending_wait(pending, NULL, NULL, NULL, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(simulator()->calls("cuStreamWaitEvent"), 0);
    assert_int_equal(state_of(f, filled), TMS_SEGMENT_PAUSED);
    for (int i = 0; i < MANY; i++) assert_int_equal(state_of(f, empty[i]), TMS_SEGMENT_PAUSED);
    assert_int_equal(physical_bytes(0) + physical_bytes(1), 0);
    (void)give_it_back(&hoard);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(filled, BYTES, 11);
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

/* The copies of the rest are in flight: a stream that waited only for them would not wait for everything. */
static void a_stream_cannot_wait_for_an_incomplete_resume(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t filled = paused(f, "a", TMS_BACKUP_PINNED, 12), damaged = allocate(f, "b", TMS_BACKUP_NONE, BYTES);
    CUstream stream = enter_and_make_stream(f);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_tag(f, "b", &error), TMS_DRIVER);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN); /* in the resume, which tries first to repair it */
    hold_copies();
    simulator()->clear_counts();
    const tms_selection_t all = {0};
    tms_pending_t *pending = NULL;
    rest_t rest = {.bytes = 0};
    ASSERT_OK(tms_resume_begin(&f->saver, &all, &pending, &error), error);
    tms_status_t status = tms_pending_wait_stream(pending, stream, release_after_the_rest, &rest, &error);
    release_copies();
    assert_int_equal(status, TMS_DRIVER);
    assert_string_equal(error.call, "cuMemUnmap");
    assert_int_equal(simulator()->calls("cuStreamWaitEvent"), 0);
    assert_int_equal(state_of(f, damaged), TMS_SEGMENT_DAMAGED);
    assert_int_equal(state_of(f, filled), TMS_SEGMENT_ACTIVE); /* wait_stream has waited for its end */
    assert_filled(filled, BYTES, 12);
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

/* The devices of earlier attempts, which have failed, must become ready once more. The last attempt copies nothing to device
 * 0, so that no stream waits for it. */
static void what_a_failed_attempt_made_ready_does_not_count(void **state) {
    fixture_t *f = *state;
    const tms_error_context_t context = {.operation = "test", .device = 0};
    tms_copier_t copier = {.open = false};
    tms_wait_t wait;
    const tms_selection_t all = {0};
    const tms_report_t report = {0};
    tms_pending_t *pending = NULL;
    tms_error_t error;
    ASSERT_OK(tms_pending_create(&f->saver, &all, &pending, &context, &error), error);
    tms_wait_begin(&wait, NULL, NULL, 0);
    ASSERT_OK(tms_copier_open(&copier, &f->saver.stores.copying, 0, &wait, &context, &error), error);
    simulator()->clear_counts();
    for (int attempt = 0; attempt < 2; attempt++) {
        tms_pending_expect(pending, 3);
        ASSERT_OK(tms_pending_ready(pending, 0, &copier, &context, &error), error);
        assert_true(tms_pending_may_undo(pending));
    }
    assert_int_equal(simulator()->calls("cuEventCreate"), 1);
    assert_int_equal(simulator()->calls("cuEventRecord"), 2);
    assert_true(tms_copier_close(&copier));
    ASSERT_OK(tms_copier_open(&copier, &f->saver.stores.copying, 1, &wait, &context, &error), error);
    tms_pending_expect(pending, 3);
    ASSERT_OK(tms_pending_ready(pending, 1, &copier, &context, &error), error);
    assert_true(tms_copier_close(&copier));
    assert_int_equal(tms_pending_wait_stream(pending, NULL, at_once, NULL, &error), TMS_INTERRUPTED);
    ASSERT_OK(tms_pending_ready(pending, 0, NULL, &context, &error), error);
    ASSERT_OK(tms_pending_wait_stream(pending, NULL, at_once, NULL, &error), error);
    assert_false(tms_pending_may_undo(pending)); /* a stream relies on it */
    assert_int_equal(simulator()->calls("cuStreamWaitEvent"), 1);
    tms_pending_end(pending, TMS_OK, &report, &error);
    tms_pending_release(pending);
}

static void set_running(fixture_t *f, bool running) {
    pthread_mutex_lock(&f->saver.lock);
    f->saver.transition_running = running;
    pthread_cond_broadcast(&f->saver.turn);
    pthread_mutex_unlock(&f->saver.lock);
}

static void take_turn(fixture_t *f) { set_running(f, true); }
static void end_turn(fixture_t *f) { set_running(f, false); }

/* A caller that gets an error may rely on nothing: the work that the test does in place of a resume can be undone. */
static void a_failed_stream_wait_guarantees_nothing(void **state) {
    fixture_t *f = *state;
    const tms_error_context_t context = {.operation = "test", .device = 0};
    tms_error_t error;
    tms_copier_t copier;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 13);
    CUstream stream = enter_and_make_stream(f);
    ASSERT_OK(tms_copier_open(&copier, &f->saver.stores.copying, 0, NULL, &context, &error), error);
    take_turn(f); /* its thread waits until the end */
    tms_pending_t *pending = begin(f, "a");
    for (int promised = 0; promised < 2; promised++) {
        tms_pending_expect(pending, 1);
        ASSERT_OK(tms_pending_ready(pending, 0, &copier, &context, &error), error);
        if (!promised) simulator()->fail_after("cuStreamWaitEvent", 0, 1, CUDA_ERROR_UNKNOWN);
        tms_status_t status = tms_pending_wait_stream(pending, stream, NULL, NULL, &error);
        assert_int_equal(status, promised ? TMS_OK : TMS_DRIVER);
        assert_int_equal(tms_pending_may_undo(pending), !promised);
        /* It has failed, and is not over: another call waits for its end, or for the next attempt. */
        assert_int_equal(tms_pending_wait_stream(pending, stream, at_once, NULL, &error), TMS_INTERRUPTED);
    }
    tms_copier_close(&copier);
    end_turn(f);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_filled(address, BYTES, 13);
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

/* Device 0's default stream, as in the CUDA runtime. */
static void a_thread_without_a_context_has_a_default_stream(void **state) {
    fixture_t *f = *state;
    const tms_error_context_t context = {.operation = "test", .device = 0};
    tms_error_t error;
    CUcontext current = NULL;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 14);
    hold_copies();
    tms_pending_t *pending = begin(f, "a");
    ASSERT_OK(tms_pending_wait_stream(pending, NULL, NULL, NULL, &error), error);
    assert_int_equal(simulator()->calls("cuStreamWaitEvent"), 1);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&current), CUDA_SUCCESS);
    assert_null(current);
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    assert_int_equal(simulator()->launch_add(NULL, address + BYTES - MIB, MIB, 1, 0), 0);
    release_copies();
    assert_int_equal(f->cuda->cuStreamSynchronize(NULL), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    uint8_t *bytes = (uint8_t *)address;
    for (uint64_t i = BYTES - MIB; i < BYTES; i++) bytes[i]--;
    assert_filled(address, BYTES, 14);
    tms_pending_release(pending);
}

/* Nor is a context created there: the error names the remedy. */
static void a_default_stream_of_a_device_that_is_not_in_use_is_refused(void **state) {
    (void)state;
    const tms_error_context_t context = {.operation = "test", .device = 1};
    tms_device_mask_t active = 0;
    tms_error_t error;
    fixture_t f;
    fixture_begin(&f, 2);
    ASSERT_OK(tms_devices_load(&f.devices, &f.cuda, &f.topology, &context, &error), error);
    ASSERT_OK(tms_devices_enter(&f.devices, 1, &context, &error), error);
    uint64_t address = allocate_on(&f, 1, "a", TMS_BACKUP_PINNED, BYTES);
    fill(address, BYTES, 15);
    ASSERT_OK(pause_tag(&f, "a", &error), error);
    tms_devices_leave(&f.devices, 1);
    hold_copies();
    tms_pending_t *pending = begin(&f, "a");
    assert_int_equal(tms_pending_wait_stream(pending, NULL, NULL, NULL, &error), TMS_INVALID_STATE);
    assert_non_null(strstr(error.message, "no CUDA context"));
    assert_non_null(strstr(error.message, "wait()"));
    ASSERT_OK(tms_devices_active(&f.devices, &active, &context, &error), error);
    assert_int_equal(active, 2);
    release_copies();
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_filled(address, BYTES, 15);
    tms_pending_release(pending);
    fixture_end(&f, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pending_resume_ends_like_any_other),
        ONE(no_progress_is_reported_in_the_background),
        ONE(a_failure_that_nobody_received_is_logged),
        ONE(a_forked_child_has_no_pending_resume),
        ONE(a_later_pause_is_left_alone),
        ONE(a_handle_may_be_released_before_the_end),
        ONE(a_stream_waits_for_the_copies_and_the_caller_does_not),
        ONE(a_failure_is_reported_by_wait_and_undone),
        ONE(copies_that_a_stream_waits_for_are_not_undone),
        ONE(a_stream_waits_for_memory_without_contents),
        ONE(several_streams_wait_for_zeros),
        TWO(a_stream_waits_for_every_device),
        TWO(out_of_memory_is_undone_although_a_stream_is_to_wait),
        TWO(what_a_failed_attempt_made_ready_does_not_count),
        ONE(a_stream_cannot_wait_for_an_incomplete_resume),
        ONE(a_failed_stream_wait_guarantees_nothing),
        ONE(a_thread_without_a_context_has_a_default_stream),
        cmocka_unit_test(a_default_stream_of_a_device_that_is_not_in_use_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
