/* Scenarios of test_memory.py: cudaMalloc and cudaFree through the interposers, and the functions that programs call
 * through ctypes. */

#include <pthread.h>

#include "support.h"

int cuCtxGetCurrent(void **context);
int cuCtxGetDevice(int *device);

static bool has_context(void) {
    void *context = NULL;
    return cuCtxGetCurrent(&context) == SUCCESS && context != NULL;
}

/* The first CUDA call of the process is cudaMalloc. */
static void first_call(void) {
    void *address = NULL;
    EQUAL(cudaMalloc(&address, 3 * MIB), SUCCESS);
    CHECK(is_managed(address));
    CHECK(has_context());
    EQUAL(usage_of(0).physical_bytes, 4 * MIB);
    EQUAL(usage_of(0).handles, 1);
    EQUAL(usage_of(0).runtime_allocations, 0);
    EQUAL(cudaMemset(address, 0x5C, 3 * MIB), SUCCESS);
    EQUAL(cudaDeviceSynchronize(), SUCCESS);
    EQUAL(((unsigned char *)address)[3 * MIB - 1], 0x5C);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(usage_of(0).reservations, 0);
}

/* The same with nothing managed: the runtime's own allocation. */
static void first_call_ordinary(void) {
    void *address = allocate(3 * MIB);
    CHECK(!is_managed(address));
    CHECK(has_context());
    EQUAL(usage_of(0).runtime_allocations, 1);
    EQUAL(usage_of(0).handles, 0);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(usage_of(0).runtime_allocations, 0);
}

/* Also in a thread that has made no CUDA call. */
static void *allocate_in_thread(void *argument) {
    (void)argument;
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    CHECK(has_context());
    return address;
}

static void first_call_of_a_thread(void) {
    pthread_t thread;
    void *address = NULL;
    EQUAL(pthread_create(&thread, NULL, allocate_in_thread, NULL), 0);
    EQUAL(pthread_join(thread, &address), 0);
    CHECK(is_managed(address));
    CHECK(!TMS(tms_get_interesting_region)()); /* the setting was the other thread's */
    EQUAL(cudaFree(address), SUCCESS);         /* by another thread, outside of a region */
    EQUAL(usage_of(0).physical_bytes, 0);
}

static void second_device(void) {
    int device = -1;
    EQUAL(cudaSetDevice(1), SUCCESS);
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    EQUAL(segment_of(address).device, 1);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(usage_of(1).physical_bytes, 2 * MIB);
    EQUAL(cudaGetDevice(&device), SUCCESS);
    EQUAL(device, 1);
    EQUAL(cuCtxGetDevice(&device), SUCCESS);
    EQUAL(device, 1);
    EQUAL(cudaFree(address), SUCCESS);
}

static void toggled_region(void) {
    CHECK(!TMS(tms_get_interesting_region)());
    void *before = allocate(2 * MIB);
    TMS(tms_set_interesting_region)(true);
    CHECK(TMS(tms_get_interesting_region)());
    void *inside = allocate(2 * MIB);
    TMS(tms_set_interesting_region)(false);
    void *after = allocate(2 * MIB);
    CHECK(!is_managed(before) && is_managed(inside) && !is_managed(after));
    EQUAL(usage_of(0).runtime_allocations, 2);
    EQUAL(usage_of(0).handles, 1);
    EQUAL(cudaFree(before), SUCCESS);
    EQUAL(cudaFree(inside), SUCCESS);
    EQUAL(cudaFree(after), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
}

static void pause_and_resume(void) {
    TMS(tms_set_interesting_region)(true);
    TMS(tms_set_current_tag)("weights");
    EQUAL(strcmp(TMS(tms_get_current_tag)(), "weights"), 0);
    void *weights = allocate(8 * MIB);
    TMS(tms_set_current_tag)("kv_cache");
    void *cache = allocate(16 * MIB);
    fill(weights, 8 * MIB, 1);
    EQUAL(usage_of(0).physical_bytes, 24 * MIB);

    EQUAL(TMS(tms_pause)("kv_cache"), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 8 * MIB);
    EQUAL(TMS(tms_pause)("kv_cache"), SUCCESS); /* again: nothing left to do */
    EQUAL(TMS(tms_pause)("an unused tag"), SUCCESS);
    CHECK(is_filled(weights, 8 * MIB, 1));
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(usage_of(0).mappings, 0);
    EQUAL(segment_of(weights).state, TMS_SEGMENT_PAUSED);
    EQUAL(segment_of(cache).state, TMS_SEGMENT_PAUSED);

    EQUAL(TMS(tms_resume)("weights"), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 8 * MIB);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 24 * MIB);
    EQUAL(segment_of(weights).address, (uintptr_t)weights);
    EQUAL(segment_of(cache).address, (uintptr_t)cache);
    CHECK(is_poisoned(weights, 8 * MIB)); /* new memory: the contents were not kept */
    EQUAL(cudaMemset(cache, 9, 16 * MIB), SUCCESS);
    EQUAL(cudaDeviceSynchronize(), SUCCESS);
    EQUAL(cudaFree(weights), SUCCESS);
    EQUAL(cudaFree(cache), SUCCESS);
    EQUAL(usage_of(0).reservations, 0);
}

/* The environment decides: prints the state of an allocation outside of any region. */
static void initial_settings(void) {
    static const char *const kinds[] = {"none", "pinned", "mmap", "disk"};
    void *address = allocate(2 * MIB);
    if (is_managed(address)) {
        tms_segment_info_t row = segment_of(address);
        printf("managed %s %s\n", row.tag, kinds[row.backup]);
    } else {
        printf("ordinary\n");
    }
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
}

static void free_in_every_state(void) {
    void *ordinary = allocate(2 * MIB);
    TMS(tms_set_interesting_region)(true);
    unsigned char *active = allocate(2 * MIB);
    unsigned char *paused = allocate(2 * MIB);
    EQUAL(cudaFree(NULL), SUCCESS);
    EQUAL(cudaFree(active + 512), INVALID_VALUE);
    CHECK(is_managed(active));
    EQUAL(cudaFree(active), SUCCESS);
    EQUAL(cudaFree(active), INVALID_VALUE); /* the runtime's answer: the address is free now */
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(cudaFree(paused + 512), INVALID_VALUE);
    EQUAL(segment_of(paused).state, TMS_SEGMENT_PAUSED);
    EQUAL(cudaFree(paused), SUCCESS);
    EQUAL(cudaFree(paused), INVALID_VALUE);
    EQUAL(cudaFree(ordinary), SUCCESS); /* inside a region, and foreign */
    EQUAL(cudaFree(ordinary), INVALID_VALUE);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(usage_of(0).reservations, 0);
    EQUAL(counters().frees_total, 2);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
}

/* 64 MiB of device memory. */
static void out_of_memory(void) {
    void *const untouched = (void *)0x1234;
    void *address = untouched;
    TMS(tms_set_interesting_region)(true);
    void *half = allocate(40 * MIB);
    EQUAL(cudaMalloc(&address, 40 * MIB), MEMORY_ALLOCATION);
    EQUAL(cudaMalloc(&address, (size_t)1 << 60), MEMORY_ALLOCATION);
    EQUAL(cudaMalloc(&address, SIZE_MAX), MEMORY_ALLOCATION);
    CHECK(address == untouched);
    EQUAL(cudaMalloc(NULL, MIB), INVALID_VALUE);
    EQUAL(usage_of(0).physical_bytes, 40 * MIB);
    EQUAL(usage_of(0).reservations, 1);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    void *other = allocate(40 * MIB);
    EQUAL(TMS(tms_resume)(NULL), MEMORY_ALLOCATION);
    EQUAL(segment_of(half).state, TMS_SEGMENT_PAUSED);
    EQUAL(cudaFree(other), SUCCESS);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 40 * MIB);
    TMS(set_memory_margin_bytes)(20 * MIB);
    EQUAL(cudaMalloc(&address, 6 * MIB), MEMORY_ALLOCATION);
    address = allocate(4 * MIB);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(cudaFree(half), SUCCESS);
}

static void size_zero(void) {
    void *const untouched = (void *)0x1234;
    void *ordinary = untouched, *managed = untouched;
    int expected = cudaMalloc(&ordinary, 0);
    TMS(tms_set_interesting_region)(true);
    EQUAL(cudaMalloc(&managed, 0), expected);
    CHECK(ordinary == managed);
    EQUAL(counters().allocations_total, 0);
}

/* A failing driver call: the program gets its number, and nothing is left behind. */
static void failing_driver(void) {
    enum { NOT_SUPPORTED = 801 };
    void *address = NULL;
    TMS(tms_set_interesting_region)(true);
    EQUAL(tms_sim_fail_after("cuMemSetAccess", 0, 1, NOT_SUPPORTED), 0);
    EQUAL(cudaMalloc(&address, 2 * MIB), NOT_SUPPORTED);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(usage_of(0).reservations, 0);
    address = allocate(2 * MIB);
    EQUAL(tms_sim_fail_after("cuMemCreate", 0, 1, MEMORY_ALLOCATION), 0);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(TMS(tms_resume)(NULL), MEMORY_ALLOCATION);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(cudaFree(address), SUCCESS);
}

/* A managed allocation needs the context that the runtime makes in its first call. Without it the allocation is ordinary. */
static void failing_runtime(void) {
    enum { SYSTEM_NOT_READY = 802 };
    TMS(tms_set_interesting_region)(true);
    EQUAL(tms_sim_fail_after("cudaFree", 0, 1, SYSTEM_NOT_READY), 0);
    void *address = allocate(2 * MIB);
    EQUAL(tms_sim_failures_fired(), 1);
    CHECK(!is_managed(address));
    EQUAL(cudaFree(address), SUCCESS);
    address = allocate(2 * MIB);
    CHECK(is_managed(address));
    EQUAL(cudaFree(address), SUCCESS);
}

/* The real function's answer, if there is nothing to manage. */
static void no_device(void) {
    void *address = NULL;
    TMS(tms_set_interesting_region)(true);
    EQUAL(cudaMalloc(&address, 2 * MIB), NO_DEVICE);
    EQUAL(cudaFree(NULL), NO_DEVICE);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS); /* of nothing */
}

/* Work on the second device with memory of the first. */
static int touch_from_second_device(void *address) {
    EQUAL(tms_sim_launch_add(NULL, (uintptr_t)address, 1, 5, 0), SUCCESS);
    return cudaDeviceSynchronize();
}

/* A device that the program begins to use gets access to existing memory when the program requests it from the runtime. */
static void enable_peer_access(void) {
    enum { PEER_ACCESS_ALREADY_ENABLED = 704 };
    TMS(tms_set_interesting_region)(true);
    unsigned char *address = allocate(2 * MIB);
    fill(address, 2 * MIB, 0);
    EQUAL(cudaSetDevice(1), SUCCESS);
    EQUAL(cudaFree(NULL), SUCCESS);
    uint64_t before = tms_sim_calls("cuMemSetAccess");
    EQUAL(cudaDeviceEnablePeerAccess(0, 0), SUCCESS);
    EQUAL(tms_sim_calls("cuMemSetAccess"), before + 1);
    EQUAL(cudaDeviceEnablePeerAccess(0, 0), PEER_ACCESS_ALREADY_ENABLED);
    EQUAL(tms_sim_calls("cuMemSetAccess"), before + 1); /* nothing new, nothing done */
    EQUAL(touch_from_second_device(address), SUCCESS);
    EQUAL(address[0], 5);
    EQUAL(cudaFree(address), SUCCESS);
}

/* What the scenario above would see if the interposer did nothing. */
static void no_peer_access(void) {
    enum { ILLEGAL_ADDRESS = 700 };
    TMS(tms_set_interesting_region)(true);
    unsigned char *address = allocate(2 * MIB);
    EQUAL(cudaSetDevice(1), SUCCESS);
    EQUAL(cudaFree(NULL), SUCCESS);
    EQUAL(touch_from_second_device(address), ILLEGAL_ADDRESS);
}

/* The program gets its answer even if giving access fails: the call was about something else. */
static void failing_peer_access(void) {
    enum { NOT_SUPPORTED = 801, PEER_ACCESS_ALREADY_ENABLED = 704 };
    TMS(tms_set_interesting_region)(true);
    unsigned char *address = allocate(2 * MIB);
    fill(address, 2 * MIB, 0);
    EQUAL(cudaSetDevice(1), SUCCESS);
    EQUAL(tms_sim_fail_after("cuMemSetAccess", 0, 1, NOT_SUPPORTED), 0);
    EQUAL(cudaDeviceEnablePeerAccess(0, 0), SUCCESS);
    EQUAL(tms_sim_failures_fired(), 1);
    /* A second request retries it, although the runtime knows the peer already. */
    EQUAL(cudaDeviceEnablePeerAccess(0, 0), PEER_ACCESS_ALREADY_ENABLED);
    EQUAL(touch_from_second_device(address), SUCCESS);
}

static void ipc_handles(void) {
    char handle[64];
    void *ordinary = allocate(2 * MIB);
    EQUAL(cudaIpcGetMemHandle(handle, ordinary), SUCCESS);
    TMS(tms_set_current_tag)("weights");
    TMS(tms_set_interesting_region)(true);
    char *managed = allocate(2 * MIB);
    EQUAL(cudaIpcGetMemHandle(handle, managed), INVALID_VALUE);
    EQUAL(cudaIpcGetMemHandle(handle, managed + MIB), INVALID_VALUE);
    EQUAL(cudaIpcGetMemHandle(NULL, ordinary), INVALID_VALUE);
    EQUAL(cudaFree(managed), SUCCESS);
    EQUAL(cudaFree(ordinary), SUCCESS);
}

static void torch_entry_points(void) {
    void *stream = NULL;
    CHECK(TMS(tms_torch_malloc)(0, 0, stream) == NULL);
    CHECK(TMS(tms_torch_malloc)(-1, 0, stream) == NULL);
    CHECK(TMS(tms_torch_malloc)((ssize_t)1 << 50, 0, stream) == NULL);
    CHECK(TMS(tms_torch_malloc)(2 * MIB, 99, stream) == NULL);
    TMS(tms_set_current_tag)("torch"); /* managed in or out of a region, with the thread's other settings */
    void *address = TMS(tms_torch_malloc)(3 * MIB, 1, stream);
    CHECK(address != NULL);
    EQUAL(segment_of(address).device, 1);
    EQUAL(segment_of(address).bytes, 3 * MIB);
    EQUAL(strcmp(segment_of(address).tag, "torch"), 0);
    TMS(tms_torch_free)(NULL, 0, 0, stream);
    TMS(tms_torch_free)(address, 3 * MIB, 1, stream);
    EQUAL(counters().allocations, 0);
    EQUAL(usage_of(1).physical_bytes, 0);
    TMS(tms_torch_free)((void *)0x123456789, 1, 0, stream); /* one warning, which the test expects */
}

MAIN(SCENARIO(first_call), SCENARIO(first_call_ordinary), SCENARIO(first_call_of_a_thread), SCENARIO(second_device),
     SCENARIO(toggled_region), SCENARIO(pause_and_resume), SCENARIO(initial_settings), SCENARIO(free_in_every_state),
     SCENARIO(out_of_memory), SCENARIO(size_zero), SCENARIO(failing_driver), SCENARIO(no_device), SCENARIO(failing_runtime),
     SCENARIO(enable_peer_access), SCENARIO(ipc_handles), SCENARIO(no_peer_access), SCENARIO(failing_peer_access),
     SCENARIO(torch_entry_points))
