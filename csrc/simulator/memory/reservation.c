/* Reserved address ranges: mmap(PROT_NONE), so that access to an unmapped address is a real fault. */
#include "simulator/memory/reservation.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/memory/entries.h"
#include "simulator/memory/stale.h"
#include "simulator/simulator.h"

static bool is_power_of_two(uint64_t value) { return value && (value & (value - 1)) == 0; }

static void *map_inaccessible(uint64_t address, uint64_t bytes, int flags) {
    return mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

/* Reserves the range at the hint; 0 if the addresses are in use. */
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
