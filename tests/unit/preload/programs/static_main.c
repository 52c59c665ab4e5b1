/* A program that contains its CUDA runtime, as nvcc links by default: libcudart_static.a, or static_runtime.c in its place.
 * Nothing that it allocates is managed, and pauses change nothing. At its end it waits for the end of its standard input. */

#include "support.h"

#define BYTES (8 * MIB)
enum { VALUE = 0x5C };

static void check_contents(const void *address) {
    unsigned char *host = malloc(BYTES);
    CHECK(host != NULL);
    EQUAL(cudaMemcpy(host, address, BYTES, COPY_DEFAULT), SUCCESS);
    for (size_t i = 0; i < BYTES; i++) EQUAL(host[i], VALUE);
    free(host);
}

int main(void) {
    void *address = allocate(BYTES);
    EQUAL(cudaMemset(address, VALUE, BYTES), SUCCESS);
    CHECK(!is_managed(address));
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    check_contents(address);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    check_contents(address);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(counters().allocations_total, 0);
    printf("nothing was managed\n");
    fflush(stdout);
    (void)getchar();
    return 0;
}
