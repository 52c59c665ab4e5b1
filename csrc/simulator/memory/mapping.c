/* A reserved range is mmap(PROT_NONE), so that access to an unmapped address is a real fault. */
#include "simulator/memory/mapping.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/devices/device.h"
#include "simulator/memory/entries.h"
#include "simulator/memory/physical.h"
#include "simulator/simulator.h"

static bool is_power_of_two(uint64_t value) { return value && (value & (value - 1)) == 0; }

static void *map_inaccessible(uint64_t address, uint64_t bytes, int flags) {
    return mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

/* Reserves the range at the hint. Returns 0 if the addresses are in use. */
static uint64_t map_at_hint(uint64_t bytes, uint64_t alignment, uint64_t hint) {
    if (!hint || hint % alignment) return 0;
    void *range = map_inaccessible(hint, bytes, MAP_FIXED_NOREPLACE);
    if (range == MAP_FAILED) return 0;
    if ((uintptr_t)range == hint) return hint;
    munmap(range, bytes); /* an old kernel treats the flag as a hint */
    return 0;
}

static uint64_t map_anywhere(uint64_t bytes, uint64_t alignment) {
    if (bytes > UINT64_MAX - alignment) return 0;
    void *range = map_inaccessible(0, bytes + alignment, 0);
    if (range == MAP_FAILED) return 0;
    uint64_t start = (uintptr_t)range, address = (start + alignment - 1) & ~(alignment - 1);
    if (address > start) munmap(range, address - start);
    if (start + alignment > address) munmap((void *)(uintptr_t)(address + bytes), start + alignment - address);
    return address;
}

CUresult sim_memory_reserve_range(uint64_t bytes, uint64_t alignment, uint64_t hint, bool runtime, uint64_t *address) {
    sim_reservation_t *reservation = calloc(1, sizeof *reservation);
    if (!reservation) return CUDA_ERROR_OUT_OF_MEMORY;
    if (alignment < TMS_SIM_GRANULARITY) alignment = TMS_SIM_GRANULARITY;
    uint64_t range = map_at_hint(bytes, alignment, hint);
    if (!range) range = map_anywhere(bytes, alignment);
    *reservation = (sim_reservation_t){.address = range, .bytes = bytes, .runtime = runtime};
    if (!range || !sim_table_insert(&sim_state.reservations, range, reservation)) {
        if (range) munmap((void *)(uintptr_t)range, bytes);
        free(reservation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!runtime) sim_state.reserved++;
    *address = range;
    return CUDA_SUCCESS;
}

void sim_memory_free_range(sim_reservation_t *reservation) {
    if (reservation->sent) sim_stale_add((sim_stale_t){.range = reservation->address});
    munmap((void *)(uintptr_t)reservation->address, reservation->bytes);
    sim_table_remove(&sim_state.reservations, reservation->address);
    if (!reservation->runtime) sim_state.reserved--;
    free(reservation);
}

sim_reservation_t *sim_memory_reservation_at(uint64_t address) {
    sim_reservation_t *reservation = sim_table_floor(&sim_state.reservations, address);
    return reservation && address - reservation->address < reservation->bytes ? reservation : NULL;
}

bool sim_memory_unreserved(uint64_t address, uint64_t bytes) {
    if (bytes > UINT64_MAX - address || sim_memory_reservation_at(address)) return false;
    size_t next = sim_table_position(&sim_state.reservations, address);
    return next == sim_state.reservations.count || sim_state.reservations.slots[next].key >= address + bytes;
}

CUresult sim_memory_reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                            unsigned long long flags) {
    if (!address || !bytes || bytes % TMS_SIM_GRANULARITY || flags) return CUDA_ERROR_INVALID_VALUE;
    if (hint % TMS_SIM_GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    if (alignment && !is_power_of_two(alignment)) return CUDA_ERROR_INVALID_VALUE;
    uint64_t range = 0;
    CUresult result = sim_memory_reserve_range(bytes, alignment, hint, false, &range);
    if (result == CUDA_SUCCESS) *address = range;
    return result;
}

CUresult sim_memory_address_free(CUdeviceptr address, size_t bytes) {
    sim_reservation_t *reservation = sim_table_find(&sim_state.reservations, address);
    if (!reservation || reservation->runtime || reservation->bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
    size_t next = sim_table_position(&sim_state.mappings, address);
    if (next < sim_state.mappings.count && sim_state.mappings.slots[next].key < address + bytes)
        return CUDA_ERROR_INVALID_VALUE;
    sim_memory_free_range(reservation);
    return CUDA_SUCCESS;
}

static bool overlaps_mapping(uint64_t address, uint64_t bytes) {
    const sim_mapping_t *before = sim_table_floor(&sim_state.mappings, address);
    if (before && address - before->address < before->span) return true;
    size_t next = sim_table_position(&sim_state.mappings, address);
    return next < sim_state.mappings.count && sim_state.mappings.slots[next].key < address + bytes;
}

CUresult sim_memory_map_physical(uint64_t address, uint64_t bytes, sim_physical_t *physical, sim_mapping_t **made) {
    const sim_reservation_t *reservation = sim_memory_reservation_at(address);
    if (!reservation || bytes > reservation->bytes - (address - reservation->address)) return CUDA_ERROR_INVALID_VALUE;
    if (overlaps_mapping(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
    sim_mapping_t *mapping = calloc(1, sizeof *mapping);
    if (!mapping) return CUDA_ERROR_OUT_OF_MEMORY;
    *mapping = (sim_mapping_t){.id = sim_state_new_id(),
                               .address = address,
                               .bytes = bytes,
                               .span = bytes,
                               .physical = physical,
                               .runtime = reservation->runtime};
    if (!sim_table_insert(&sim_state.mappings, address, mapping)) {
        free(mapping);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    int file = physical->file >= 0 ? physical->file : sim_state.devices[physical->device].memory;
    if (mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, physical->offset) == MAP_FAILED) {
        sim_table_remove(&sim_state.mappings, address);
        free(mapping);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical->mapped++;
    if (!mapping->runtime) sim_state.devices[physical->device].mappings++;
    *made = mapping;
    return CUDA_SUCCESS;
}

CUresult sim_memory_map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                        unsigned long long flags) {
    sim_physical_t *physical = sim_memory_find_physical(handle);
    sim_mapping_t *mapping = NULL;
    if (!bytes || address % TMS_SIM_GRANULARITY || flags || !physical) return CUDA_ERROR_INVALID_VALUE;
    if (offset || bytes != physical->bytes) return CUDA_ERROR_NOT_SUPPORTED;
    const sim_reservation_t *reservation = sim_memory_reservation_at(address);
    if (!reservation || reservation->runtime) return CUDA_ERROR_INVALID_VALUE;
    return sim_memory_map_physical(address, bytes, physical, &mapping);
}

sim_mapping_t *sim_memory_mapping_at(uint64_t address) {
    sim_mapping_t *mapping = sim_table_floor(&sim_state.mappings, address);
    return mapping && address - mapping->address < mapping->bytes ? mapping : NULL;
}

/* Whether a range consists exactly of adjacent mappings of one reservation. *first is the index of the first mapping. */
static bool covers_mappings(uint64_t address, uint64_t bytes, bool runtime, size_t *first) {
    const sim_reservation_t *reservation = sim_memory_reservation_at(address);
    if (!reservation || reservation->runtime != runtime || !bytes) return false;
    if (bytes > reservation->bytes - (address - reservation->address)) return false;
    uint64_t at = address;
    *first = sim_table_position(&sim_state.mappings, address);
    for (size_t i = *first; at < address + bytes; i++) {
        if (i == sim_state.mappings.count || sim_state.mappings.slots[i].key != at) return false;
        at += ((const sim_mapping_t *)sim_state.mappings.slots[i].value)->span;
    }
    return at == address + bytes;
}

/* Whether a range can be unmapped: it lies in one reservation, and no mapping crosses its ends. Unmapped gaps are allowed,
 * as by the real driver. *first is the index of the first mapping. */
static bool contains_mappings(uint64_t address, uint64_t bytes, bool runtime, size_t *first) {
    const sim_reservation_t *reservation = sim_memory_reservation_at(address);
    if (!reservation || reservation->runtime != runtime || !bytes) return false;
    if (address % TMS_SIM_GRANULARITY || bytes % TMS_SIM_GRANULARITY) return false;
    if (bytes > reservation->bytes - (address - reservation->address)) return false;
    const sim_mapping_t *before = sim_table_floor(&sim_state.mappings, address);
    if (before && before->address < address && address - before->address < before->span) return false;
    const sim_mapping_t *last = sim_table_floor(&sim_state.mappings, address + bytes - 1);
    *first = sim_table_position(&sim_state.mappings, address);
    return !last || last->address < address || last->address + last->span <= address + bytes;
}

static void remove_mapping(sim_mapping_t *mapping) {
    sim_physical_t *physical = mapping->physical;
    /* MAP_FIXED keeps the addresses reserved at every moment. */
    (void)mmap((void *)(uintptr_t)mapping->address, mapping->span, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    sim_table_remove(&sim_state.mappings, mapping->address);
    if (!mapping->runtime) sim_state.devices[physical->device].mappings--;
    physical->mapped--;
    free(mapping);
    sim_memory_drop_physical(physical);
}

static bool is_pinned(size_t first, uint64_t end) {
    for (size_t i = first; i < sim_state.mappings.count && sim_state.mappings.slots[i].key < end; i++) {
        if (((const sim_mapping_t *)sim_state.mappings.slots[i].value)->pins) return true;
    }
    return false;
}

CUresult sim_memory_unmap_range(uint64_t address, uint64_t bytes, bool runtime) {
    size_t first = 0;
    /* Only one thread at a time waits for pins. During the wait workers take no new pins, so it lasts at most one chunk. */
    while (sim_state.unmapping) {
        if (!sim_state_wait()) return CUDA_ERROR_DEINITIALIZED;
    }
    if (!contains_mappings(address, bytes, runtime, &first)) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    sim_state.unmapping = true;
    while (result == CUDA_SUCCESS && is_pinned(first, address + bytes)) {
        if (!sim_state_wait()) result = CUDA_ERROR_DEINITIALIZED;
        /* Other threads may have changed the mappings while the lock was free. */
        if (result == CUDA_SUCCESS && !contains_mappings(address, bytes, runtime, &first)) result = CUDA_ERROR_INVALID_VALUE;
    }
    sim_state.unmapping = false;
    sim_state_changed();
    if (result != CUDA_SUCCESS) return result;
    while (first < sim_state.mappings.count && sim_state.mappings.slots[first].key < address + bytes)
        remove_mapping(sim_state.mappings.slots[first].value);
    return CUDA_SUCCESS;
}

CUresult sim_memory_unmap(CUdeviceptr address, size_t bytes) { return sim_memory_unmap_range(address, bytes, false); }

static int host_protection(const sim_mapping_t *mapping) {
    int protection = PROT_NONE;
    for (int i = 0; i < TMS_SIM_MAX_DEVICES; i++) {
        if (mapping->access[i] & CU_MEM_ACCESS_FLAGS_PROT_READ) protection |= PROT_READ;
        if (mapping->access[i] == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection |= PROT_READ | PROT_WRITE;
    }
    return protection;
}

CUresult sim_memory_remap(const sim_physical_t *physical, int file) {
    for (size_t i = 0; i < sim_state.mappings.count; i++) {
        const sim_mapping_t *mapping = sim_state.mappings.slots[i].value;
        if (mapping->physical != physical) continue;
        void *address = (void *)(uintptr_t)mapping->address;
        if (mmap(address, mapping->span, host_protection(mapping), MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

static bool is_touched(CUmemGenericAllocationHandle handle) {
    for (size_t i = 0; i < sim_state.mappings.count; i++) {
        const sim_mapping_t *mapping = sim_state.mappings.slots[i].value;
        if (mapping->physical->id == handle && mapping->pins) return true;
    }
    return false;
}

CUresult sim_memory_await_pins(CUmemGenericAllocationHandle handle) {
    CUresult result = CUDA_SUCCESS;
    while (sim_state.unmapping) {
        if (!sim_state_wait()) return CUDA_ERROR_DEINITIALIZED;
    }
    sim_state.unmapping = true;
    while (result == CUDA_SUCCESS && is_touched(handle)) {
        if (!sim_state_wait()) result = CUDA_ERROR_DEINITIALIZED;
    }
    sim_state.unmapping = false;
    sim_state_changed();
    return result;
}

/* The host emulates all devices, so its protection is the union of their access rights. */
CUresult sim_memory_protect(sim_mapping_t *mapping, int device, CUmemAccess_flags flags) {
    mapping->access[device] = flags;
    int status = mprotect((void *)(uintptr_t)mapping->address, mapping->span, host_protection(mapping));
    return status == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult check_access(const CUmemAccessDesc *access, int owner) {
    if ((int)access->location.type == SIM_LOCATION_HOST) return CUDA_ERROR_NOT_SUPPORTED;
    if (access->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(access->location.id)) return CUDA_ERROR_INVALID_VALUE;
    if (access->location.id != owner && !sim_state.peer_capable) return CUDA_ERROR_INVALID_DEVICE;
    switch ((int)access->flags) {
    case CU_MEM_ACCESS_FLAGS_PROT_NONE:
    case CU_MEM_ACCESS_FLAGS_PROT_READ:
    case CU_MEM_ACCESS_FLAGS_PROT_READWRITE: return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult sim_memory_set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    size_t first = 0;
    CUresult result = CUDA_SUCCESS;
    if (!access || !count || !covers_mappings(address, bytes, false, &first)) return CUDA_ERROR_INVALID_VALUE;
    for (uint64_t pass = 0; pass < 2; pass++) { /* the first pass validates, the second applies */
        for (size_t i = first; i < sim_state.mappings.count && sim_state.mappings.slots[i].key < address + bytes; i++) {
            sim_mapping_t *mapping = sim_state.mappings.slots[i].value;
            for (size_t j = 0; j < count && result == CUDA_SUCCESS; j++) {
                result = pass == 0 ? check_access(&access[j], mapping->physical->device)
                                   : sim_memory_protect(mapping, access[j].location.id, access[j].flags);
            }
        }
    }
    return result;
}

CUresult sim_memory_get_access(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    const sim_mapping_t *mapping = sim_memory_mapping_at(address);
    if (!flags || !location) return CUDA_ERROR_INVALID_VALUE;
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || !sim_device_valid(location->id)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (!mapping || mapping->runtime) return CUDA_ERROR_INVALID_VALUE;
    *flags = (unsigned long long)mapping->access[location->id];
    return CUDA_SUCCESS;
}

CUresult sim_memory_retain(CUmemGenericAllocationHandle *handle, void *address) {
    sim_mapping_t *mapping = sim_memory_mapping_at((uintptr_t)address);
    if (!handle || !mapping || mapping->runtime) return CUDA_ERROR_INVALID_VALUE;
    mapping->physical->references++;
    *handle = mapping->physical->id;
    return CUDA_SUCCESS;
}

void sim_memory_clear(void) {
    while (sim_state.mappings.count) remove_mapping(sim_state.mappings.slots[0].value);
    while (sim_state.reservations.count) sim_memory_free_range(sim_state.reservations.slots[0].value);
    sim_memory_clear_physicals();
    sim_table_release(&sim_state.mappings);
    sim_table_release(&sim_state.reservations);
    for (int i = 0; i < TMS_SIM_MAX_DEVICES; i++) sim_state.devices[i].runtime_allocations = 0;
}
