#include "simulator/contexts/host_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/contexts/entries.h"
#include "simulator/devices/context.h"
#include "simulator/memory/host.h"
#include "simulator/memory/mapping.h"
#include "simulator/streams/stream.h"

static const unsigned known_flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
/* Not CU_MEMHOSTREGISTER_IOMEMORY: the simulation has no device I/O memory. */
static const unsigned register_flags =
    CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
static const uint64_t address_space_bytes = (uint64_t)1 << 47; /* size of a process's address space */
static const uint64_t registration_limit = (uint64_t)1 << 40;  /* size that one registration cannot exceed on any machine */

CUresult sim_host_allocate(void **address, size_t bytes, unsigned int flags) {
    if (address) *address = NULL; /* cleared on every error, and for zero bytes */
    if (!address || flags & ~known_flags) return CUDA_ERROR_INVALID_VALUE;
    if (!bytes) return CUDA_SUCCESS;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    (void)madvise(memory, bytes, MADV_HUGEPAGE); /* optional: a kernel without huge pages uses small ones */
    CUresult result = sim_host_add((uintptr_t)memory, bytes, false, flags, sim_context_current());
    if (result == CUDA_SUCCESS)
        *address = memory;
    else
        munmap(memory, bytes);
    return result;
}

/* Releases a block when no work in flight uses it. With `wait_for_context` it first waits for all work of the block's
 * context, and of no other context, as the real driver does. An address inside a block is CUDA_ERROR_INVALID_VALUE;
 * `missing` is returned only if no block contains it. */
static CUresult release_block(uint64_t address, bool registered, CUresult missing, bool wait_for_context) {
    sim_host_t *host = sim_host_at(address);
    if (!host) return sim_memory_mapping_at(address) ? CUDA_ERROR_INVALID_VALUE : missing;
    if (host->address != address || host->registered != registered) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = wait_for_context ? sim_stream_drain(host->context) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) return result;
    host = sim_table_find(&sim_state.hosts, address); /* another thread may have released it during the wait */
    if (!host) return missing;
    result = sim_stream_wait_for_host(host->address, host->bytes); /* the remaining work belongs to other devices */
    if (result != CUDA_SUCCESS) return result;
    host = sim_table_find(&sim_state.hosts, address);
    if (!host) return missing;
    sim_host_remove(host);
    return CUDA_SUCCESS;
}

/* Releases a block, unless its context has an error; the current context is irrelevant. */
static CUresult release_healthy(uint64_t address, bool registered, CUresult missing) {
    const sim_host_t *host = sim_host_at(address);
    CUresult failed = host ? host->context->error : CUDA_SUCCESS;
    return failed == CUDA_SUCCESS ? release_block(address, registered, missing, true) : failed;
}

CUresult sim_host_free(void *address) {
    return address ? release_healthy((uintptr_t)address, false, CUDA_ERROR_INVALID_VALUE) : CUDA_SUCCESS;
}

/* Whether every page of a range is mapped and readable, and also writable if `written`. */
static bool are_accessible(uint64_t address, uint64_t end, bool written) {
    char line[SIM_NAME_BYTES];
    uint64_t first = 0, last = 0, at = address;
    char read = 0, write = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return true; /* assume that it is accessible */
    while (at < end && fgets(line, sizeof line, maps)) {
        /* The rest of a long line (a file name) does not parse as a range. */
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %c%c", &first, &last, &read, &write) != 4 || last <= at) continue;
        if (first > at || read != 'r' || (written && write != 'w')) break;
        at = last;
    }
    fclose(maps);
    return at >= end;
}

/* Checks the pages of a range. Returns the real driver's error codes. */
static CUresult check_pages(uint64_t address, uint64_t bytes, bool written) {
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    if (bytes > address_space_bytes) return CUDA_ERROR_NOT_SUPPORTED;
    if (bytes > memory || bytes >= registration_limit) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!sim_memory_unreserved(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return are_accessible(address, address + bytes, written) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_host_register(void *address, size_t bytes, unsigned int flags) {
    uint64_t start = (uintptr_t)address;
    if (!start || !bytes || bytes > UINT64_MAX - start || flags & ~register_flags) return CUDA_ERROR_INVALID_VALUE;
    const sim_host_t *known = sim_host_at(start);
    size_t next = sim_table_position(&sim_state.hosts, start);
    if (!known && next < sim_state.hosts.count && sim_state.hosts.slots[next].key < start + bytes)
        known = sim_state.hosts.slots[next].value;
    if (known) return known->registered ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_pages(start, bytes, !(flags & CU_MEMHOSTREGISTER_READ_ONLY));
    /* All kinds of registration make the pages accessible. */
    return result == CUDA_SUCCESS ? sim_host_add(start, bytes, true, flags, sim_context_current()) : result;
}

CUresult sim_host_unregister(void *address) {
    CUresult missing = address ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_ERROR_INVALID_VALUE;
    return release_healthy((uintptr_t)address, true, missing);
}

/* The host address is also the device address. */
CUresult sim_host_device_pointer(void **device, void *host, unsigned int flags) {
    if (!device || flags || !sim_host_at((uintptr_t)host)) return CUDA_ERROR_INVALID_VALUE;
    *device = host;
    return CUDA_SUCCESS;
}

CUresult sim_host_device_address(CUdeviceptr *device, void *host, unsigned int flags) {
    void *address = NULL;
    CUresult result = device ? sim_host_device_pointer(&address, host, flags) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) *device = (uintptr_t)address;
    return result;
}

/* Addresses are unified, so that all pinned memory is mapped for devices. */
CUresult sim_host_flags(unsigned int *flags, void *address) {
    const sim_host_t *host = sim_host_at((uintptr_t)address);
    if (!flags || !host) return CUDA_ERROR_INVALID_VALUE;
    *flags = host->flags | CU_MEMHOSTALLOC_DEVICEMAP;
    return CUDA_SUCCESS;
}

/* A context owns its blocks. */
void sim_host_clear_context(const sim_context_t *context) {
    for (size_t i = 0; i < sim_state.hosts.count;) {
        const sim_host_t *host = sim_state.hosts.slots[i].value;
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        if (host->context == context)
            result = release_block(host->address, host->registered, CUDA_ERROR_INVALID_VALUE, false);
        /* The release may have waited for work. The table may have changed during the wait. */
        i = result == CUDA_SUCCESS ? 0 : i + 1;
    }
}
