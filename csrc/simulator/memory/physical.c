/* Physical memory is a piece of its device's memfd. A file per allocation could exceed the process's limit of open files.
 *
 * Some returned pieces stay in a cache, because the system takes much longer to allocate and clear pages than poisoning
 * them again. A piece with few pages keeps them; the cache holds at most kept_bytes in total. Any other piece returns its
 * pages to the system (a punched hole), and its offsets are never reused. In both cases the next owner of a piece finds
 * poison or zeros, never an earlier owner's data. */
#include "simulator/memory/physical.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/device.h"
#include "simulator/memory/entries.h"
#include "simulator/simulator.h"

static const uint64_t kept_bytes = (uint64_t)64 << 20; /* cached free pages per device */
static const uint64_t edge_bytes = (uint64_t)64 << 10; /* poison at each end of a piece that is not poisoned entirely */

static bool poison_range(int file, off_t offset, uint64_t bytes) {
    enum { BUFFER_BYTES = 1 << 16 };
    char buffer[BUFFER_BYTES];
    memset(buffer, TMS_SIM_POISON, sizeof buffer);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t part = bytes - done < sizeof buffer ? bytes - done : sizeof buffer;
        ssize_t written = pwrite(file, buffer, part, offset + (off_t)done);
        if (written < 0 && errno != EINTR) return false;
        if (written > 0) done += (uint64_t)written;
    }
    return true;
}

/* Calls `visit` for each extent of a range that has pages. False as soon as `visit` returns false. A NULL `visit` only
 * counts bytes. */
static bool visit_pages(int file, off_t start, uint64_t bytes, bool (*visit)(int, off_t, uint64_t), uint64_t *count) {
    off_t end = start + (off_t)bytes, next = 0;
    *count = 0;
    for (off_t at = lseek(file, start, SEEK_DATA); at >= 0 && at < end; at = lseek(file, next, SEEK_DATA)) {
        next = lseek(file, at, SEEK_HOLE);
        if (next < 0 || next > end) next = end;
        *count += (uint64_t)(next - at);
        if (visit && !visit(file, at, (uint64_t)(next - at))) return false;
        if (next == end) break;
    }
    return true;
}

/* Whether a piece is poisoned entirely, and therefore has all its pages. */
static bool is_filled(uint64_t bytes) { return bytes <= sim_state.poison_limit || bytes <= 2 * edge_bytes; }

static bool poison(int file, off_t offset, uint64_t bytes) {
    uint64_t backed = 0;
    if (is_filled(bytes)) return poison_range(file, offset, bytes);
    return visit_pages(file, offset + (off_t)edge_bytes, bytes - 2 * edge_bytes, poison_range, &backed) &&
           poison_range(file, offset, edge_bytes) && poison_range(file, offset + (off_t)(bytes - edge_bytes), edge_bytes);
}

static void punch_hole(int file, off_t offset, uint64_t bytes) {
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, (off_t)bytes);
}

static void remove_kept(sim_device_t *device, unsigned index) {
    device->kept_backed_bytes -= device->kept[index].backed_bytes;
    device->kept_count--;
    memmove(&device->kept[index], &device->kept[index + 1], (device->kept_count - index) * sizeof device->kept[0]);
}

/* Takes the most recently cached piece of this size: its pages are the likeliest to be in the processor's cache. */
static bool take_kept(sim_device_t *device, uint64_t bytes, off_t *offset) {
    for (unsigned i = device->kept_count; i-- > 0;) {
        if (device->kept[i].bytes != bytes) continue;
        *offset = device->kept[i].offset;
        remove_kept(device, i);
        return true;
    }
    return false;
}

bool sim_piece_take(sim_device_t *device, uint64_t bytes, off_t *offset) {
    off_t found = device->end;
    if (device->memory < 0) device->memory = memfd_create("simulated GPU", MFD_CLOEXEC);
    if (device->memory < 0) return false;
    if (!take_kept(device, bytes, &found)) {
        if (ftruncate(device->memory, found + (off_t)bytes) != 0) return false;
        device->end = found + (off_t)bytes;
    }
    if (!poison(device->memory, found, bytes)) {
        sim_piece_put(device, found, bytes, false);
        return false;
    }
    *offset = found;
    return true;
}

void sim_piece_put(sim_device_t *device, off_t offset, uint64_t bytes, bool keep) {
    uint64_t backed = bytes, limit = sim_state.poison_limit < kept_bytes ? sim_state.poison_limit : kept_bytes;
    /* Only pieces that are partly poisoned need the count. Seeking the end of an extent scans the extents of later
     * pieces, which is too slow for many small ones. */
    if (keep && !is_filled(bytes)) visit_pages(device->memory, offset, bytes, NULL, &backed);
    if (!keep || backed > limit) {
        punch_hole(device->memory, offset, bytes);
        return;
    }
    while (device->kept_count == SIM_KEPT_PIECES || device->kept_backed_bytes + backed > kept_bytes) {
        punch_hole(device->memory, device->kept[0].offset, device->kept[0].bytes);
        remove_kept(device, 0);
    }
    device->kept[device->kept_count++] = (sim_piece_t){.offset = offset, .bytes = bytes, .backed_bytes = backed};
    device->kept_backed_bytes += backed;
}

void sim_piece_clear(sim_device_t *device) {
    if (device->memory >= 0) close(device->memory);
    device->memory = -1;
    device->end = 0;
    device->kept_count = 0;
    device->kept_backed_bytes = 0;
}

static void free_physical(const sim_physical_t *physical) {
    if (physical->sent && physical->file >= 0) sim_stale_add((sim_stale_t){.file = physical->file_id});
    if (physical->imported) {
        close(physical->file);
        return;
    }
    if (physical->file >= 0)
        close(physical->file);
    else /* a piece that another process may still have open is never reused */
        sim_piece_put(&sim_state.devices[physical->device], physical->offset, physical->bytes, !physical->shared_in_place);
    if (!physical->module) sim_budget_credit(physical->device, physical->bytes, false);
}

/* Whether another process, or a descriptor in this one, holds the memory: see export.c. */
static bool has_holder(const sim_physical_t *physical) {
    if (physical->imported || physical->file < 0) return false;
    if (flock(physical->file, LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK;
    flock(physical->file, LOCK_UN);
    return false;
}

void sim_memory_drop_physical(sim_physical_t *physical) {
    if (physical->references || physical->mapped) return;
    bool was_held = physical->held;
    physical->held = has_holder(physical);
    sim_state.held += (unsigned)physical->held - (unsigned)was_held;
    if (physical->held) return;
    free_physical(physical);
    sim_table_remove(&sim_state.physicals, physical->id);
    if (!physical->runtime) sim_state.devices[physical->device].handles--;
    free(physical);
}

void sim_memory_sweep(void) {
    for (size_t i = sim_state.physicals.count; sim_state.held && i-- > 0;) {
        sim_physical_t *physical = sim_state.physicals.slots[i].value;
        if (physical->held) sim_memory_drop_physical(physical);
    }
}

CUresult sim_memory_create_physical(int device, uint64_t bytes, bool runtime, sim_physical_t **made) {
    sim_device_t *owner = &sim_state.devices[device];
    sim_physical_t *physical = calloc(1, sizeof *physical);
    if (!physical) return CUDA_ERROR_OUT_OF_MEMORY;
    sim_memory_sweep();
    if (!sim_budget_charge(device, bytes, false)) goto no_budget;
    *physical = (sim_physical_t){
        .id = sim_state_new_id(), .device = device, .bytes = bytes, .references = 1, .runtime = runtime, .file = -1};
    if (!sim_piece_take(owner, bytes, &physical->offset)) goto no_memory;
    if (!sim_table_insert(&sim_state.physicals, physical->id, physical)) goto no_entry;
    if (!runtime) owner->handles++;
    *made = physical;
    return CUDA_SUCCESS;

no_entry:
    sim_piece_put(owner, physical->offset, bytes, true);
no_memory:
    sim_budget_credit(device, bytes, false);
no_budget:
    free(physical);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

sim_physical_t *sim_memory_find_physical(CUmemGenericAllocationHandle handle) {
    sim_physical_t *physical = sim_table_find(&sim_state.physicals, handle);
    return physical && physical->references && !physical->runtime ? physical : NULL;
}

static CUresult check_properties(const CUmemAllocationProp *properties) {
    if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    int kind = (int)properties->location.type;
    if (kind >= SIM_LOCATION_HOST && kind <= SIM_LOCATION_HOST_NUMA_CURRENT) return CUDA_ERROR_NOT_SUPPORTED;
    if (kind != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    enum { FABRIC = 8 }; /* CU_MEM_HANDLE_TYPE_FABRIC of newer headers */
    /* Unknown types are ignored, as the real driver does. A fabric handle needs a service that most machines lack. */
    unsigned types = (unsigned)properties->requestedHandleTypes;
    if (types & (CU_MEM_HANDLE_TYPE_WIN32 | CU_MEM_HANDLE_TYPE_WIN32_KMT)) return CUDA_ERROR_INVALID_VALUE;
    if (types & FABRIC) return CUDA_ERROR_NOT_PERMITTED;
    return sim_device_valid(properties->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult sim_memory_granularity(size_t *granularity, const CUmemAllocationProp *properties,
                                CUmemAllocationGranularity_flags option) {
    /* The real driver ignores the properties here, too. */
    if (!granularity || !properties || (unsigned)option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = TMS_SIM_GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult sim_memory_create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                           unsigned long long flags) {
    if (!handle || !bytes || bytes % TMS_SIM_GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_properties(properties);
    sim_physical_t *physical = NULL;
    if (result == CUDA_SUCCESS) result = sim_memory_create_physical(properties->location.id, bytes, false, &physical);
    if (result != CUDA_SUCCESS) return result;
    physical->handle_types = (unsigned)properties->requestedHandleTypes;
    physical->rdma = properties->allocFlags.gpuDirectRDMACapable;
    *handle = physical->id;
    return CUDA_SUCCESS;
}

CUresult sim_memory_release(CUmemGenericAllocationHandle handle) {
    sim_physical_t *physical = sim_memory_find_physical(handle);
    if (!physical) return CUDA_ERROR_INVALID_VALUE;
    physical->references--;
    sim_memory_drop_physical(physical);
    return CUDA_SUCCESS;
}

CUresult sim_memory_properties(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    const sim_physical_t *physical = sim_memory_find_physical(handle);
    if (!properties || !physical) return CUDA_ERROR_INVALID_VALUE;
    *properties = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                        .requestedHandleTypes = (CUmemAllocationHandleType)physical->handle_types,
                                        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = physical->device},
                                        .allocFlags = {.gpuDirectRDMACapable = physical->rdma}};
    return CUDA_SUCCESS;
}

void sim_memory_clear_physicals(void) {
    while (sim_state.physicals.count) {
        sim_physical_t *physical = sim_state.physicals.slots[0].value;
        physical->references = 0;
        physical->imported = physical->imported || has_holder(physical); /* their holders keep it */
        sim_memory_drop_physical(physical);
    }
    sim_table_release(&sim_state.physicals);
}

enum { FIRST_CAPACITY = 16 };

void sim_stale_add(sim_stale_t entry) {
    if (sim_state.stale_count == sim_state.stale_capacity) {
        size_t capacity = sim_state.stale_capacity ? 2 * sim_state.stale_capacity : FIRST_CAPACITY;
        void *grown = realloc(sim_state.stale, capacity * sizeof *sim_state.stale);
        if (!grown) return;
        sim_state.stale = grown;
        sim_state.stale_capacity = capacity;
    }
    sim_state.stale[sim_state.stale_count++] = entry;
}

sim_stale_t *sim_stale_take(size_t *count) {
    sim_stale_t *taken = sim_state.stale;
    *count = sim_state.stale_count;
    sim_state.stale = NULL;
    sim_state.stale_count = sim_state.stale_capacity = 0;
    return taken;
}
