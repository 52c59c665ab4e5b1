#include "simulator/memory/access.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "simulator/base/simulation.h"
#include "simulator/memory/mapping.h"
#include "simulator/simulator.h"

static bool may_touch(const sim_mapping_t *mapping, unsigned devices, bool writes, const sim_context_t *kernel) {
    unsigned needed = writes ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    if (mapping->runtime) {
        int owner = mapping->physical->device;
        return !kernel || kernel->device == owner || kernel->peers[owner];
    }
    for (int i = 0; i < TMS_SIM_MAX_DEVICES; i++) {
        if (devices >> i & 1 && (mapping->access[i] & needed) != needed) return false;
    }
    return true;
}

sim_mapping_t *sim_memory_pin(uint64_t address, uint64_t *bytes, unsigned devices, bool writes,
                              const sim_context_t *kernel) {
    sim_mapping_t *mapping = sim_memory_mapping_at(address);
    if (!mapping || !may_touch(mapping, devices, writes, kernel)) {
        sim_state_thread()->unreachable = address;
        return NULL;
    }
    uint64_t left = mapping->bytes - (address - mapping->address);
    if (*bytes > left) *bytes = left;
    mapping->pins++;
    return mapping;
}

void sim_memory_unpin(sim_mapping_t *mapping) {
    if (--mapping->pins == 0 && sim_state.unmapping) sim_state_changed();
}

bool sim_memory_reachable(uint64_t address, uint64_t bytes, unsigned devices, bool writes, const sim_context_t *kernel) {
    if (bytes > UINT64_MAX - address) return false;
    for (uint64_t at = address, end = address + bytes; at < end;) {
        const sim_mapping_t *mapping = sim_memory_mapping_at(at);
        if (!mapping || !may_touch(mapping, devices, writes, kernel)) {
            sim_state_thread()->unreachable = at;
            return false;
        }
        at = mapping->address + mapping->bytes;
    }
    return true;
}

bool sim_memory_read_word(const sim_context_t *context, uint64_t address, uint64_t *word) {
    uint64_t bytes = sizeof *word;
    sim_mapping_t *mapping = sim_memory_pin(address, &bytes, 1U << context->device, false, context);
    if (!mapping) return false;
    if (bytes == sizeof *word) memcpy(word, (const void *)(uintptr_t)address, sizeof *word);
    sim_memory_unpin(mapping);
    return bytes == sizeof *word;
}

void sim_memory_populate(uint64_t address, uint64_t bytes, bool writes) {
    static const uint64_t page = 4096, worth_while = (uint64_t)1 << 16;
    static const int populate_read = 22, populate_write = 23; /* since Linux 5.14; older headers lack the names */
    uint64_t start = address / page * page;
    if (bytes < worth_while) return;
    (void)madvise((void *)(uintptr_t)start, address + bytes - start, writes ? populate_write : populate_read);
}

enum { CLOCK_TEXT_BYTES = 16 };

static double seconds_of(clockid_t clock) {
    static const double nanosecond = 1e-9;
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * nanosecond;
}

/* The local time of day of a moment that was `seconds` ago. */
static void write_time_of_day(double seconds, char *text) {
    time_t moment = (time_t)(seconds_of(CLOCK_REALTIME) - seconds);
    struct tm parts;
    localtime_r(&moment, &parts);
    strftime(text, CLOCK_TEXT_BYTES, "%H:%M:%S", &parts);
}

bool sim_access_describe(const char *what, uint64_t address, char *text) {
    const tms_api_t *manager = atomic_load(&sim_state.manager);
    tms_segment_info_t row = {.state = TMS_SEGMENT_ACTIVE};
    if (!manager || manager->find(address, 1, &row) != TMS_OK || row.state == TMS_SEGMENT_ACTIVE) {
        snprintf(text, SIM_ACCESS_BYTES, "%s accesses 0x%" PRIx64 ", where its device has no memory", what, address);
        return false;
    }
    char time_of_day[CLOCK_TEXT_BYTES];
    double ago = seconds_of(CLOCK_MONOTONIC) - row.changed_at;
    write_time_of_day(ago, time_of_day);
    snprintf(text, SIM_ACCESS_BYTES,
             "%s accesses 0x%" PRIx64
             " in memory of the tag '%s', which was paused %.3f s before, at %s; resume the tag first, also before a "
             "backward that needs what a forward in its region has saved",
             what, address, row.tag, ago, time_of_day);
    return true;
}

void sim_access_fault(const char *what, uint64_t address) {
    char text[SIM_ACCESS_BYTES];
    pthread_mutex_unlock(&sim_state.lock);
    (void)sim_access_describe(what, address, text);
    pthread_mutex_lock(&sim_state.lock);
    if (!sim_state.illegal_access[0])
        snprintf(sim_state.illegal_access, sizeof sim_state.illegal_access, "an illegal memory access was encountered: %s",
                 text);
}

void sim_access_end(void) {
    if (sim_state.illegal_access[0] && !atomic_load(&sim_state.illegal_access_read))
        fprintf(stderr, "simulated GPU: %s\n", sim_state.illegal_access);
}
