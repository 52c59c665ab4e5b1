/* Runs with the preload library and neighbour.c, in either order: each sees the right calls, and nothing recurses. */

#include "support.h"

int neighbour_cuda_mallocs(void);
int neighbour_cuda_frees(void);
int neighbour_mallocs(void);

static void ordinary(void) {
    void *address = allocate(2 * MIB);
    CHECK(!is_managed(address));
    EQUAL(TMS(neighbour_cuda_mallocs)(), 2); /* the program's and the guard's */
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(TMS(neighbour_cuda_frees)(), 2);
    EQUAL(usage_of(0).physical_bytes, 0);
    CHECK(TMS(neighbour_mallocs)() > 0);
}

static void managed(void) {
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    CHECK(is_managed(address));
    fill(address, 2 * MIB, 1);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(cudaFree(address), INVALID_VALUE);
    EQUAL(usage_of(0).physical_bytes, 0);
}

/* With ours first: allocations of the neighbour inside a call of ours are not the program's, and stay ordinary. */
static void nested(void) {
    void *address = NULL;
    TMS(tms_set_interesting_region)(true);
    int result = cudaMalloc(&address, 0); /* the real one, which is the neighbour, answers */
    EQUAL(TMS(neighbour_cuda_mallocs)(), 2);
    EQUAL(counters().allocations_total, 0);
    EQUAL(cudaMalloc(&address, 0), result);
    address = allocate(2 * MIB);
    CHECK(is_managed(address)); /* the call is over, and the next one is the program's again */
    EQUAL(cudaFree(address), SUCCESS);
}

MAIN(SCENARIO(ordinary), SCENARIO(managed), SCENARIO(nested))
