/* Pinned host memory, allocated or registered. */
#include <stdlib.h>
#include <sys/mman.h>

#include "sim_modules.h"

static const unsigned known_flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;

sim_host_t *sim_host_at(uint64_t address) {
    sim_host_t *host = sim_table_floor(&sim_state.hosts, address);
    return host && address - host->address < host->bytes ? host : NULL;
}

static CUresult add_host(uint64_t address, uint64_t bytes, bool registered) {
    sim_host_t *host = calloc(1, sizeof *host);
    if (!host) return CUDA_ERROR_OUT_OF_MEMORY;
    *host = (sim_host_t){.address = address, .bytes = bytes, .registered = registered};
    if (!sim_table_insert(&sim_state.hosts, address, host)) {
        free(host);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_state.host_bytes += bytes;
    return CUDA_SUCCESS;
}

static void remove_host(sim_host_t *host) {
    sim_table_remove(&sim_state.hosts, host->address);
    sim_state.host_bytes -= host->bytes;
    if (!host->registered) munmap((void *)(uintptr_t)host->address, host->bytes);
    free(host);
}

CUresult sim_host_allocate(void **address, size_t bytes, unsigned int flags) {
    if (!address || !bytes || flags & ~known_flags) return CUDA_ERROR_INVALID_VALUE;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = add_host((uintptr_t)memory, bytes, false);
    if (result == CUDA_SUCCESS)
        *address = memory;
    else
        munmap(memory, bytes);
    return result;
}

/* Takes a block away once no work in flight uses it. */
static CUresult take_away(uint64_t address, bool registered, CUresult missing) {
    sim_host_t *host = sim_table_find(&sim_state.hosts, address);
    if (!host || host->registered != registered) return missing;
    CUresult result = sim_stream_wait_for_host(host->address, host->bytes);
    if (result != CUDA_SUCCESS) return result;
    host = sim_table_find(&sim_state.hosts, address); /* another thread may have been faster */
    if (!host) return missing;
    remove_host(host);
    return CUDA_SUCCESS;
}

CUresult sim_host_free(void *address) { return take_away((uintptr_t)address, false, CUDA_ERROR_INVALID_VALUE); }

CUresult sim_host_register(void *address, size_t bytes, unsigned int flags) {
    uint64_t start = (uintptr_t)address;
    (void)flags; /* every kind of registration makes the same pages usable */
    if (!start || !bytes || bytes > UINT64_MAX - start) return CUDA_ERROR_INVALID_VALUE;
    size_t next = sim_table_position(&sim_state.hosts, start);
    bool overlaps = next < sim_state.hosts.count && sim_state.hosts.slots[next].key < start + bytes;
    if (overlaps || sim_host_at(start)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return add_host(start, bytes, true);
}

CUresult sim_host_unregister(void *address) {
    return take_away((uintptr_t)address, true, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

/* One address serves both sides. */
CUresult sim_host_device_pointer(void **device, void *host, unsigned int flags) {
    if (!device || flags || !sim_host_at((uintptr_t)host)) return CUDA_ERROR_INVALID_VALUE;
    *device = host;
    return CUDA_SUCCESS;
}

void sim_host_clear(void) {
    while (sim_state.hosts.count) remove_host(sim_state.hosts.slots[0].value);
    sim_table_release(&sim_state.hosts);
}
