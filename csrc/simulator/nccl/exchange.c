#include "simulator/nccl/exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simulator/base/process.h"
#include "simulator/nccl/error.h"

enum { RING_BYTES = 64 << 10, SMALL_RING_BYTES = 4 << 10, FEW_RANKS = 8, PAGE = 4096, SLEEP_NANOSECONDS = 10000000 };

static uint64_t ring_stride(const sim_nccl_exchange_t *exchange) { return sizeof(sim_nccl_ring_t) + exchange->ring_bytes; }

static uint64_t slots_start(void) { return (sizeof(sim_nccl_shared_t) + PAGE - 1) / PAGE * PAGE; }

static uint64_t rings_start(const sim_nccl_exchange_t *exchange) {
    return slots_start() + (uint64_t)exchange->ranks * SIM_NCCL_SLOTS * SIM_NCCL_SLOT_BYTES;
}

int sim_nccl_exchange_create(sim_nccl_location_t *location) {
    struct stat status;
    int file = memfd_create("simulated nccl", MFD_CLOEXEC);
    if (file < 0 || fstat(file, &status) != 0) return -1;
    *location = (sim_nccl_location_t){.process = getpid(), .file = file, .file_id = status.st_ino};
    return file;
}

void sim_nccl_exchange_close_file(const sim_nccl_location_t *location) {
    struct stat status;
    if (location->process != getpid() || fstat(location->file, &status) != 0) return;
    if (status.st_ino == location->file_id) close(location->file); /* otherwise it was closed and its number reused */
}

/* Identifies the simulated machine. Devices of different machines are distinct. */
static uint64_t machine_id(void) {
    uint64_t hash = 14695981039346656037U; /* FNV-1a */
    for (const char *at = sim_state.shared_name; *at; at++) hash = (hash ^ (uint8_t)*at) * 1099511628211U;
    return sim_state.shared_name[0] ? hash : hash ^ (uint64_t)getpid();
}

/* The caller holds the file's lock against the other ranks. */
static sim_nccl_result_t take_seat(const sim_nccl_exchange_t *exchange, int device) {
    sim_nccl_shared_t *shared = exchange->shared;
    sim_nccl_seat_t *seat = &shared->seats[exchange->rank];
    uint64_t machine = machine_id();
    if (shared->ranks == 0) shared->ranks = exchange->ranks;
    if (shared->ranks != exchange->ranks)
        return sim_nccl_fail(SIM_NCCL_INVALID_ARGUMENT,
                             "rank %u has %u ranks, another rank has %u; pass the same number to all", exchange->rank,
                             exchange->ranks, shared->ranks);
    if (atomic_load(&seat->presence) != SIM_NCCL_ABSENT)
        return sim_nccl_fail(SIM_NCCL_INVALID_USAGE, "rank %u has already joined; give each process another rank",
                             exchange->rank);
    for (unsigned i = 0; i < exchange->ranks; i++) {
        const sim_nccl_seat_t *other = &shared->seats[i];
        if (atomic_load(&other->presence) != SIM_NCCL_ABSENT && other->machine == machine && other->device == device)
            return sim_nccl_fail(SIM_NCCL_INVALID_USAGE,
                                 "rank %u and rank %u are both on device %d; give each rank its own device", exchange->rank,
                                 i, device);
    }
    seat->process = getpid();
    seat->started = sim_process_started(getpid());
    seat->device = device;
    seat->machine = machine;
    atomic_store(&seat->presence, SIM_NCCL_PRESENT);
    atomic_fetch_add(&shared->joined, 1);
    return SIM_NCCL_SUCCESS;
}

sim_nccl_result_t sim_nccl_exchange_join(sim_nccl_exchange_t *exchange, const sim_nccl_location_t *location, int device) {
    const sim_ipc_name_t name = {.process = location->process, .file = location->file, .file_id = location->file_id};
    struct stat status;
    sim_nccl_result_t result = SIM_NCCL_SYSTEM;
    int file = sim_ipc_open(&name);
    if (file < 0)
        return sim_nccl_fail(SIM_NCCL_REMOTE,
                             "process %d, which created the unique id, has exited or has closed it; create a new one with "
                             "ncclGetUniqueId and use it once",
                             location->process);
    exchange->ring_bytes = exchange->ranks <= FEW_RANKS ? RING_BYTES : SMALL_RING_BYTES;
    exchange->bytes = rings_start(exchange) + (uint64_t)exchange->ranks * exchange->ranks * ring_stride(exchange);
    void *shared = MAP_FAILED;
    if (flock(file, LOCK_EX) != 0 || fstat(file, &status) != 0) goto failed;
    if ((uint64_t)status.st_size < exchange->bytes && ftruncate(file, (off_t)exchange->bytes) != 0) goto failed;
    shared = mmap(NULL, exchange->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) goto failed;
    exchange->shared = shared;
    result = take_seat(exchange, device);
    flock(file, LOCK_UN);
    close(file);
    if (result != SIM_NCCL_SUCCESS)
        sim_nccl_exchange_leave(exchange);
    else
        sim_nccl_announce(exchange);
    return result;

failed:
    result = sim_nccl_fail(SIM_NCCL_SYSTEM, "no shared memory for the ranks: %s", strerror(errno));
    close(file);
    return result;
}

void sim_nccl_exchange_leave(sim_nccl_exchange_t *exchange) {
    if (exchange->shared) munmap(exchange->shared, exchange->bytes);
    exchange->shared = NULL;
}

sim_nccl_seat_t *sim_nccl_seat(const sim_nccl_exchange_t *exchange, unsigned rank) { return &exchange->shared->seats[rank]; }

uint8_t *sim_nccl_slot(const sim_nccl_exchange_t *exchange, unsigned rank, uint64_t step) {
    uint64_t slot = (uint64_t)rank * SIM_NCCL_SLOTS + step % SIM_NCCL_SLOTS;
    return (uint8_t *)exchange->shared + slots_start() + slot * SIM_NCCL_SLOT_BYTES;
}

sim_nccl_ring_t *sim_nccl_ring(const sim_nccl_exchange_t *exchange, unsigned from, unsigned to) {
    uint64_t ring = (uint64_t)from * exchange->ranks + to;
    return (void *)((uint8_t *)exchange->shared + rings_start(exchange) + ring * ring_stride(exchange));
}

uint8_t *sim_nccl_ring_data(const sim_nccl_exchange_t *exchange, sim_nccl_ring_t *ring) {
    (void)exchange;
    return (uint8_t *)(ring + 1);
}

bool sim_nccl_is_present(const sim_nccl_exchange_t *exchange, unsigned rank) {
    const sim_nccl_seat_t *seat = sim_nccl_seat(exchange, rank);
    if (atomic_load(&seat->presence) != SIM_NCCL_PRESENT) return false;
    return seat->process == getpid() || sim_process_started(seat->process) == seat->started;
}

static long futex(_Atomic(uint32_t) *word, int operation, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

void sim_nccl_announce(const sim_nccl_exchange_t *exchange) {
    atomic_fetch_add(&exchange->shared->changes, 1);
    futex(&exchange->shared->changes, FUTEX_WAKE, INT_MAX, NULL);
}

uint32_t sim_nccl_changes(const sim_nccl_exchange_t *exchange) { return atomic_load(&exchange->shared->changes); }

bool sim_nccl_sleep(const sim_nccl_exchange_t *exchange, uint32_t seen) {
    static const struct timespec time = {.tv_nsec = SLEEP_NANOSECONDS};
    return futex(&exchange->shared->changes, FUTEX_WAIT, seen, &time) == 0 || errno != ETIMEDOUT;
}
