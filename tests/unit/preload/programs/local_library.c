/* Opened by local_main.c: linked with the runtime, as torch's libraries are. */

#include "support.h"

static void managed(void) {
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB); /* the first CUDA call of the process */
    CHECK(is_managed(address));
    EQUAL(usage_of(0).runtime_allocations, 0);
    EQUAL(cudaMemset(address, 1, 2 * MIB), SUCCESS); /* in the context that the allocation made current */
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(cudaFree(address), SUCCESS);
}

static void ordinary(void) {
    void *address = allocate(2 * MIB);
    CHECK(!is_managed(address));
    EQUAL(usage_of(0).runtime_allocations, 1);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(usage_of(0).runtime_allocations, 0);
}

static void captures(void) {
    void *stream = NULL, *graph = NULL;
    EQUAL(cudaStreamCreateWithFlags(&stream, STREAM_NON_BLOCKING), SUCCESS);
    EQUAL(cudaStreamBeginCapture(stream, CAPTURE_MODE_RELAXED), SUCCESS);
    EQUAL(counters().visible_captures, 1);
    EQUAL(cudaStreamEndCapture(stream, &graph), SUCCESS);
    EQUAL(counters().visible_captures, 0);
    EQUAL(cudaStreamDestroy(stream), SUCCESS);
}

int run(int argc, char **argv) {
    const scenario_t scenarios[] = {SCENARIO(managed), SCENARIO(ordinary), SCENARIO(captures)};
    return run_scenario(scenarios, sizeof(scenarios) / sizeof(*scenarios), argc, argv);
}
