#include "sim_state.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_modules.h"

static const uint64_t default_device_bytes = (uint64_t)8 << 30;
static const uint64_t default_poison_limit = (uint64_t)8 << 20;

sim_state_t sim_state = {.lock = PTHREAD_MUTEX_INITIALIZER, .trace_file = -1, .shared_file = -1};

/* What a program may change, as it is before the environment was read. */
static void set_defaults(void) {
    sim_state.epoch++;
    sim_state.initialized = false;
    sim_state.deinitialized = false;
    sim_state.stopping = false;
    sim_state.machine_count = 1;
    sim_visible_all();
    sim_state.device_bytes = default_device_bytes;
    sim_state.bandwidth = 0;
    sim_state.peer_capable = true;
    sim_state.tracing = false;
    sim_state.failures = 0;
    sim_state.kernels_launched = sim_state.kernels_skipped = 0;
    sim_table_release(&sim_state.kernels_named);
    memset(sim_state.faults, 0, sizeof sim_state.faults);
    sim_state.fault_any = (sim_fault_t){0};
    for (int i = 0; i < TMS_SIM_MAX_DEVICES; i++)
        sim_state.devices[i] = (sim_device_t){.memory = -1, .primary = {.device = i}};
}

static void set_up(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&sim_state.changed, &attributes);
    pthread_condattr_destroy(&attributes);
    sim_state.next_id = SIM_FIRST_ID;
    sim_state.poison_limit = default_poison_limit;
    set_defaults();
    sim_environment_read();
    sim_budget_attach();
    atomic_store(&sim_state.pid, getpid());
}

bool sim_state_forked(void) {
    int pid = atomic_load_explicit(&sim_state.pid, memory_order_relaxed);
    return pid != 0 && pid != getpid();
}

bool sim_state_lock(void) {
    if (sim_state_forked()) return false;
    pthread_mutex_lock(&sim_state.lock);
    if (atomic_load_explicit(&sim_state.pid, memory_order_relaxed) == 0) set_up();
    return true;
}

void sim_state_unlock(void) { pthread_mutex_unlock(&sim_state.lock); }

sim_thread_t *sim_state_thread(void) {
    static _Thread_local sim_thread_t thread;
    if (thread.epoch != sim_state.epoch) {
        uint64_t id = thread.id ? thread.id : atomic_fetch_add(&sim_state.next_thread, 1) + 1;
        thread = (sim_thread_t){.epoch = sim_state.epoch, .id = id, .mode = CU_STREAM_CAPTURE_MODE_GLOBAL};
    }
    return &thread;
}

bool sim_state_wait(void) {
    if (sim_state.stopping || sim_state.deinitialized) return false;
    pthread_cond_wait(&sim_state.changed, &sim_state.lock);
    return !sim_state.stopping && !sim_state.deinitialized;
}

bool sim_state_wait_briefly(void) {
    enum { POLL_NANOSECONDS = 1000000, NANOSECONDS = 1000000000 };
    struct timespec end;
    if (sim_state.stopping) return false;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += POLL_NANOSECONDS;
    if (end.tv_nsec >= NANOSECONDS) {
        end.tv_nsec -= NANOSECONDS;
        end.tv_sec++;
    }
    pthread_cond_timedwait(&sim_state.changed, &sim_state.lock, &end);
    return !sim_state.stopping && !sim_state.deinitialized;
}

void sim_state_changed(void) { pthread_cond_broadcast(&sim_state.changed); }

/* Told once, and not at each look: two threads that wait would go on waking each other. */
void sim_state_begin_synchronizing(void) {
    sim_state.synchronizing++;
    sim_state_changed();
}

void sim_state_end_synchronizing(void) { sim_state.synchronizing--; }

/* Steps of 16 keep identifiers aligned as real pointers would be. */
uint64_t sim_state_new_id(void) { return sim_state.next_id += 16; }

void sim_state_clear(void) {
    sim_stream_clear();
    sim_capture_clear();
    sim_graph_clear();
    sim_event_clear();
    sim_table_release(&sim_state.gates);
    sim_memory_clear();
    sim_host_clear();
    sim_context_clear();
    for (int i = 0; i < TMS_SIM_MAX_DEVICES; i++) {
        sim_budget_credit(i, sim_state.devices[i].taken, true);
        sim_piece_clear(&sim_state.devices[i]);
    }
}

void tms_sim_reset(int devices, uint64_t memory_bytes) {
    if (!sim_state_lock()) return;
    sim_state_clear();
    set_defaults();
    sim_entry_clear();
    sim_state.machine_count = devices < 0 ? 0 : devices > TMS_SIM_MAX_DEVICES ? TMS_SIM_MAX_DEVICES : devices;
    sim_visible_all();
    sim_state.device_bytes = memory_bytes;
    sim_state_unlock();
}

void tms_sim_deinitialize(void) {
    if (!sim_state_lock()) return;
    sim_state.deinitialized = true;
    sim_state_changed();
    sim_state_unlock();
}

/* The end of the process, or of the library in it. Threads of the program may go on calling: they get
 * CUDA_ERROR_DEINITIALIZED. Mappings stay, because such a thread may be looking at them. */
__attribute__((destructor)) static void tear_down(void) {
    if (atomic_load(&sim_state.pid) == 0 || sim_state_forked()) return;
    pthread_mutex_lock(&sim_state.lock);
    sim_state.deinitialized = true;
    if (sim_state.report) sim_report();
    sim_stream_clear();
    sim_budget_detach();
    if (sim_state.trace_file >= 0) close(sim_state.trace_file);
    sim_state.trace_file = -1;
    pthread_mutex_unlock(&sim_state.lock);
}
