#include "simulator/memory/host.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"

sim_host_t *sim_host_at(uint64_t address) {
    sim_host_t *host = sim_table_floor(&sim_state.hosts, address);
    return host && address - host->address < host->bytes ? host : NULL;
}

CUresult sim_host_add(uint64_t address, uint64_t bytes, bool registered, unsigned flags, sim_context_t *context) {
    sim_host_t *host = calloc(1, sizeof *host);
    if (!host) return CUDA_ERROR_OUT_OF_MEMORY;
    *host = (sim_host_t){.address = address, .bytes = bytes, .registered = registered, .flags = flags, .context = context};
    if (!sim_table_insert(&sim_state.hosts, address, host)) {
        free(host);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_state.host_bytes += bytes;
    return CUDA_SUCCESS;
}

void sim_host_remove(sim_host_t *host) {
    sim_table_remove(&sim_state.hosts, host->address);
    sim_state.host_bytes -= host->bytes;
    if (!host->registered) munmap((void *)(uintptr_t)host->address, host->bytes);
    free(host);
}

void sim_host_clear(void) {
    while (sim_state.hosts.count) sim_host_remove(sim_state.hosts.slots[0].value);
    sim_table_release(&sim_state.hosts);
}
