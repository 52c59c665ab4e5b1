/* Scenarios of test_capture.py: the interposers count each stream capture once, and only while it lasts. */

#include <pthread.h>

#include "support.h"

int cuStreamEndCapture(void *stream, void **graph);
int cudaDeviceReset(void);

static void *new_stream(void) {
    void *stream = NULL;
    EQUAL(cudaStreamCreateWithFlags(&stream, STREAM_NON_BLOCKING), SUCCESS);
    return stream;
}

static void *new_graph(void) {
    void *graph = NULL;
    EQUAL(cudaGraphCreate(&graph, 0), SUCCESS);
    return graph;
}

static uint64_t captures(void) { return counters().visible_captures; }

/* The trace has one call name a line. */
static bool was_called(const char *name) {
    static char trace[1 << 16];
    CHECK(tms_sim_read_trace(trace, sizeof(trace)) < sizeof(trace));
    for (const char *line = trace; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strcspn(line, "\n") == strlen(name) && strncmp(line, name, strlen(name)) == 0) return true;
    }
    return false;
}

static void pause_fails(void) {
    void *stream = new_stream(), *graph = NULL;
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    EQUAL(cudaMemset(address, 1, 2 * MIB), SUCCESS);
    EQUAL(cudaDeviceSynchronize(), SUCCESS);
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(captures(), 1);
    tms_sim_clear_counts();
    tms_sim_trace(1);
    EQUAL(TMS(tms_pause)(NULL), CAPTURE_UNSUPPORTED);
    EQUAL(TMS(tms_resume)(NULL), CAPTURE_UNSUPPORTED);
    CHECK(!was_called("cuCtxSynchronize") && !was_called("cuMemUnmap"));
    tms_sim_trace(0);
    EQUAL(segment_of(address).state, TMS_SEGMENT_ACTIVE);
    EQUAL(usage_of(0).physical_bytes, 2 * MIB);
    EQUAL(((unsigned char *)address)[MIB], 1);
    EQUAL(tms_sim_launch_add(stream, (uintptr_t)address, 2 * MIB, 4, 0), SUCCESS);
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    EQUAL(captures(), 0);

    /* The capture is valid, and its graph runs after calls that it could not have survived before. */
    void *executable = NULL;
    EQUAL(cudaGraphInstantiate(&executable, graph, 0), SUCCESS);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(cudaMemset(address, 1, 2 * MIB), SUCCESS);
    EQUAL(cudaDeviceSynchronize(), SUCCESS);
    EQUAL(cudaGraphLaunch(executable, stream), SUCCESS);
    EQUAL(cudaDeviceSynchronize(), SUCCESS);
    EQUAL(((unsigned char *)address)[MIB], 5);
    EQUAL(cudaFree(address), SUCCESS);
}

static void free_is_deferred(void) {
    void *stream = new_stream(), *graph = NULL;
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    tms_sim_clear_counts();
    tms_sim_trace(1);
    EQUAL(cudaFree(address), SUCCESS);
    CHECK(!was_called("cuCtxSynchronize") && !was_called("cuMemUnmap") && !was_called("cudaFree"));
    CHECK(!is_managed(address));
    EQUAL(counters().deferred_frees, 1);
    EQUAL(usage_of(0).physical_bytes, 2 * MIB);
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    CHECK(was_called("cuCtxSynchronize") && was_called("cuMemUnmap"));
    EQUAL(counters().deferred_frees, 0);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(usage_of(0).reservations, 0);
}

static void allocation_during_capture(void) {
    void *stream = new_stream(), *graph = NULL;
    TMS(tms_set_interesting_region)(true);
    EQUAL(cudaStreamBeginCapture(stream, 0), SUCCESS); /* global mode: the strictest */
    void *address = allocate(2 * MIB);
    CHECK(is_managed(address));
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    EQUAL(cudaFree(address), SUCCESS);
}

static void every_begin(void) {
    void *stream = new_stream(), *ended = NULL;
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(captures(), 1);
    EQUAL(cudaStreamEndCapture(stream, &ended), SUCCESS);
    EQUAL(captures(), 0);
    EQUAL(cudaStreamBeginCapture_ptsz(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(captures(), 1);
    EQUAL(cudaStreamEndCapture_ptsz(stream, &ended), SUCCESS);
    EQUAL(captures(), 0);
    void *graph = new_graph();
    EQUAL(cudaStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(captures(), 1);
    EQUAL(cudaStreamEndCapture(stream, &ended), SUCCESS);
    EQUAL(captures(), 0);
    EQUAL(cudaStreamBeginCaptureToGraph_ptsz(stream, graph, NULL, NULL, 0, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(captures(), 1);
    EQUAL(cudaStreamEndCapture_ptsz(stream, &ended), SUCCESS);
    EQUAL(captures(), 0);
}

/* A begin that the runtime refuses, as on the legacy stream, is no capture. */
static void failed_begin(void) {
    void *ended = NULL;
    EQUAL(cudaStreamBeginCapture(NULL, CAPTURE_MODE_RELAXED), CAPTURE_UNSUPPORTED);
    EQUAL(cudaStreamBeginCaptureToGraph(NULL, new_graph(), NULL, NULL, 0, CAPTURE_MODE_RELAXED), CAPTURE_UNSUPPORTED);
    EQUAL(captures(), 0);
    CHECK(cudaStreamEndCapture(NULL, &ended) != SUCCESS);
    CHECK(cudaStreamEndCapture_ptsz(NULL, &ended) != SUCCESS);
    EQUAL(captures(), 0);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
}

static void count_cannot_drift(void) {
    enum { STREAMS = 3 };
    void *stream[STREAMS], *graph = NULL;
    for (int i = 0; i < STREAMS; i++) stream[i] = new_stream();
    CHECK(cudaStreamEndCapture(stream[0], &graph) != SUCCESS); /* never begun */
    EQUAL(captures(), 0);
    EQUAL(cudaStreamBeginCapture(stream[0], CAPTURE_MODE_RELAXED), SUCCESS);
    CHECK(cudaStreamEndCapture(stream[1], &graph) != SUCCESS); /* another one */
    EQUAL(captures(), 1);
    CHECK(cudaStreamBeginCapture(stream[0], CAPTURE_MODE_RELAXED) != SUCCESS); /* a second time */
    EQUAL(captures(), 1);
    EQUAL(cudaStreamBeginCapture(stream[1], CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(cudaStreamBeginCapture(stream[2], CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(captures(), STREAMS);
    EQUAL(cudaStreamEndCapture(stream[0], &graph), SUCCESS); /* not the last begun */
    EQUAL(captures(), 2);
    EQUAL(cudaStreamEndCapture(stream[2], &graph), SUCCESS);
    EQUAL(cudaStreamEndCapture(stream[1], &graph), SUCCESS);
    EQUAL(captures(), 0);
    EQUAL(tms_sim_fail_after("cudaStreamBeginCapture", 0, 1, CAPTURE_UNSUPPORTED), 0);
    EQUAL(cudaStreamBeginCapture(stream[0], CAPTURE_MODE_RELAXED), CAPTURE_UNSUPPORTED);
    EQUAL(captures(), 0);
}

/* A failed end leaves the capture as it is, as on the wrong thread; so does the count. */
static void failed_end(void) {
    enum { WRONG_THREAD = 908 };
    void *stream = new_stream(), *graph = NULL;
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(tms_sim_fail_after("cudaStreamEndCapture", 0, 1, WRONG_THREAD), 0); /* each form of it */
    EQUAL(cudaStreamEndCapture(stream, &graph), WRONG_THREAD);
    EQUAL(captures(), 1);
    EQUAL(cudaStreamEndCapture_ptsz(stream, &graph), WRONG_THREAD);
    EQUAL(captures(), 1);
    EQUAL(TMS(tms_pause)(NULL), CAPTURE_UNSUPPORTED);
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    EQUAL(captures(), 0);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(cudaFree(address), SUCCESS);
}

static void destroyed_stream(void) {
    void *stream = new_stream();
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(captures(), 1);
    if (cudaStreamDestroy(stream) == SUCCESS)
        EQUAL(captures(), 0);
    else
        EQUAL(captures(), 1);
    EQUAL(cudaStreamDestroy(new_stream()), SUCCESS);
}

/* An end that bypasses the interposers: the stream's entry serves its next capture, and is removed with the end of that. */
static void unseen_end(void) {
    void *stream = new_stream(), *graph = NULL;
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(cuStreamEndCapture(stream, &graph), SUCCESS);
    for (int i = 0; i < 3; i++) {
        EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
        EQUAL(captures(), 1);
        if (i < 2) EQUAL(cuStreamEndCapture(stream, &graph), SUCCESS);
    }
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    EQUAL(captures(), 0);
}

/* Nor does such an end block a pause: the stream is queried. */
static void end_by_the_driver(void) {
    void *stream = new_stream(), *graph = NULL;
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB), *freed = allocate(2 * MIB);
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(cudaFree(freed), SUCCESS);
    EQUAL(counters().deferred_frees, 1);
    EQUAL(cuStreamEndCapture(stream, &graph), SUCCESS);
    EQUAL(captures(), 1);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(captures(), 0);
    EQUAL(counters().deferred_frees, 0);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(cudaFree(address), SUCCESS);
}

/* A reset ends the captures of its device, and of no other. */
static void reset_device(void) {
    void *stream[2], *graph = NULL;
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    for (int device = 0; device < 2; device++) {
        EQUAL(cudaSetDevice(device), SUCCESS);
        stream[device] = new_stream();
        EQUAL(cudaStreamBeginCapture(stream[device], CAPTURE_MODE_RELAXED), SUCCESS);
    }
    EQUAL(captures(), 2);
    EQUAL(tms_sim_fail_after("cudaDeviceReset", 0, 1, CAPTURE_UNSUPPORTED), 0);
    EQUAL(cudaSetDevice(0), SUCCESS);
    EQUAL(cudaDeviceReset(), CAPTURE_UNSUPPORTED);
    EQUAL(captures(), 2);
    EQUAL(cudaDeviceReset(), SUCCESS);
    EQUAL(captures(), 1);
    EQUAL(cudaSetDevice(1), SUCCESS);
    EQUAL(cudaStreamEndCapture(stream[1], &graph), SUCCESS);
    EQUAL(captures(), 0);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(segment_of(address).state, TMS_SEGMENT_PAUSED);
    EQUAL(cudaFree(address), SUCCESS);
}

/* Stands for a Python program's GIL: the callback of a pause needs it, and the thread that begins a capture holds it. */
static pthread_mutex_t gil = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t in_callback;

static int32_t find_live(void *context, tms_live_t *live) {
    (void)context;
    (void)live;
    pthread_barrier_wait(&in_callback);
    EQUAL(pthread_mutex_lock(&gil), 0);
    EQUAL(pthread_mutex_unlock(&gil), 0);
    return 1;
}

static void *pause_everything(void *argument) {
    (void)argument;
    const tms_selection_t selection = {.find_live = find_live};
    tms_error_t error;
    EQUAL(API()->pause(&selection, NULL, &error), TMS_OK);
    return NULL;
}

static void begin_with_what_a_callback_needs(void) {
    const tms_region_settings_t region = {.managed = 1, .backup = TMS_BACKUP_PINNED, .tag = "a"};
    void *stream = new_stream(), *graph = NULL;
    pthread_t thread;
    uint64_t entered = 0;
    EQUAL(API()->region_enter(&region, 0, &entered, NULL), TMS_OK);
    void *address = allocate(2 * MIB);
    EQUAL(API()->region_leave(entered), 0);
    EQUAL(pthread_barrier_init(&in_callback, NULL, 2), 0);
    EQUAL(pthread_mutex_lock(&gil), 0);
    EQUAL(pthread_create(&thread, NULL, pause_everything, NULL), 0);
    pthread_barrier_wait(&in_callback);
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), CAPTURE_UNSUPPORTED);
    EQUAL(captures(), 0);
    CHECK(cuStreamEndCapture(stream, &graph) != SUCCESS); /* it has not begun */
    EQUAL(pthread_mutex_unlock(&gil), 0);
    EQUAL(pthread_join(thread, NULL), 0);
    EQUAL(segment_of(address).state, TMS_SEGMENT_PAUSED);
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    EQUAL(cudaFree(address), SUCCESS);
}

/* cuda_graph() announces the capture with its settings before the interposer sees it. They are for torch's pools, whose
 * allocations may come from threads without a region, such as autograd's; a thread in a region keeps its own. They do not
 * apply to a cudaMalloc of another thread. */
static void *allocate_for_pool(void *argument) {
    (void)argument;
    void *address = TMS(tms_torch_malloc)(2 * MIB, 0, NULL);
    CHECK(address != NULL);
    return address;
}

static void *allocate_for_itself(void *argument) {
    (void)argument;
    return allocate(2 * MIB);
}

static void *from_another_thread(void *(*how)(void *)) {
    pthread_t thread;
    void *address = NULL;
    EQUAL(pthread_create(&thread, NULL, how, NULL), 0);
    EQUAL(pthread_join(thread, &address), 0);
    return address;
}

static void announced_settings(void) {
    const tms_region_settings_t settings = {.managed = 1, .backup = TMS_BACKUP_MMAP, .tag = "cuda_graph"};
    const tms_region_settings_t region = {.managed = 1, .backup = TMS_BACKUP_NONE, .tag = "weights"};
    void *stream = new_stream(), *graph = NULL;
    uint64_t entered = 0;
    EQUAL(API()->capture_begin(&settings, NULL, NULL), TMS_OK);
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(captures(), 1); /* it is the announced one */
    void *pooled = from_another_thread(allocate_for_pool);
    EQUAL(strcmp(segment_of(pooled).tag, "cuda_graph"), 0);
    EQUAL(segment_of(pooled).backup, TMS_BACKUP_MMAP);
    EQUAL(API()->region_enter(&region, 0, &entered, NULL), TMS_OK);
    void *inside = allocate(2 * MIB);
    EQUAL(strcmp(segment_of(inside).tag, "weights"), 0);
    EQUAL(API()->region_leave(entered), 0);
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    /* Still announced, and no longer capturing: now the simulated cudaMalloc allows it as well. */
    void *ordinary = from_another_thread(allocate_for_itself);
    CHECK(!is_managed(ordinary));
    CHECK(API()->capture_end(0, 0));
    EQUAL(captures(), 0);
    EQUAL(cudaFree(ordinary), SUCCESS);
    EQUAL(cudaFree(inside), SUCCESS);
    EQUAL(cudaFree(pooled), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
}

/* More streams than there are entries for them. */
static void many_captures(void) {
    enum { STREAMS = 20, REMEMBERED = 16 };
    void *stream[STREAMS], *graph = NULL;
    for (int i = 0; i < STREAMS; i++) {
        stream[i] = new_stream();
        EQUAL(cudaStreamBeginCapture(stream[i], CAPTURE_MODE_RELAXED), SUCCESS);
    }
    EQUAL(captures(), REMEMBERED);
    for (int i = STREAMS; i-- > 0;) EQUAL(cudaStreamEndCapture(stream[i], &graph), SUCCESS);
    EQUAL(captures(), 0);
}

/* Threads that capture and end in a tight loop: no announcement is lost or counted twice. */
static void *capture_repeatedly(void *argument) {
    (void)argument;
    enum { ROUNDS = 200 };
    void *stream = new_stream(), *graph = NULL;
    for (int i = 0; i < ROUNDS; i++) {
        EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
        CHECK(captures() >= 1);
        EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    }
    return NULL;
}

static void captures_of_many_threads(void) {
    enum { THREADS = 4 };
    pthread_t thread[THREADS];
    for (int i = 0; i < THREADS; i++) EQUAL(pthread_create(&thread[i], NULL, capture_repeatedly, NULL), 0);
    for (int i = 0; i < THREADS; i++) EQUAL(pthread_join(thread[i], NULL), 0);
    EQUAL(captures(), 0);
}

MAIN(SCENARIO(pause_fails), SCENARIO(free_is_deferred), SCENARIO(allocation_during_capture), SCENARIO(every_begin),
     SCENARIO(failed_begin), SCENARIO(count_cannot_drift), SCENARIO(failed_end), SCENARIO(destroyed_stream),
     SCENARIO(unseen_end), SCENARIO(announced_settings), SCENARIO(many_captures), SCENARIO(captures_of_many_threads),
     SCENARIO(end_by_the_driver), SCENARIO(reset_device), SCENARIO(begin_with_what_a_callback_needs))
