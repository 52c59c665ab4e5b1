/* Linked with an empty runtime: the working one is preloaded after the library under test. Prints how many allocations are
 * managed and how many are the runtime's. */

#include <dlfcn.h>
#include <stdio.h>

#include "simulator/simulator.h"

int cudaMalloc(void **address, unsigned long bytes);
int cudaFree(void *address);

int main(void) {
    enum { BYTES = 2 << 20 };
    void *address = NULL;
    tms_sim_usage_t usage;
    void (*read_usage)(int, tms_sim_usage_t *) = NULL;
    if (cudaMalloc(&address, BYTES) != 0) return 1;
    *(void **)&read_usage = dlsym(RTLD_DEFAULT, "tms_sim_usage");
    read_usage(0, &usage);
    printf("managed %d %d\n", (int)usage.handles, (int)usage.runtime_allocations);
    if (cudaFree(address) != 0) return 1;
    read_usage(0, &usage);
    return usage.physical_bytes == 0 ? 0 : 1;
}
