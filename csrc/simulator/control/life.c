#include "simulator/control/life.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/control/calls.h"
#include "simulator/control/environment.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/context.h"
#include "simulator/devices/visible.h"
#include "simulator/memory/access.h"
#include "simulator/memory/host.h"
#include "simulator/memory/mapping.h"
#include "simulator/memory/physical.h"
#include "simulator/nccl/communicator.h"
#include "simulator/runtime/modules.h"
#include "simulator/simulator.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"
#include "simulator/work/event.h"
#include "simulator/work/graph.h"

/* Reports on stderr the resources that are in use at exit: those still owned, such as a framework's cache, and leaks. */
static void report(void) {
    sim_memory_sweep();
    bool clean = !sim_state.reserved && !sim_state.host_bytes;
    for (int i = 0; i < sim_state.device_count; i++) {
        const sim_device_t *device = &sim_state.devices[i];
        if (!device->used && !device->mappings && !device->streams) continue;
        clean = false;
        fprintf(stderr,
                "simulated GPU: in use at the end on device %d: %llu bytes in %llu handles and %llu runtime allocations, "
                "%llu mappings, "
                "%llu streams\n",
                i, (unsigned long long)device->used, (unsigned long long)device->handles,
                (unsigned long long)device->runtime_allocations, (unsigned long long)device->mappings,
                (unsigned long long)device->streams);
    }
    if (sim_state.reserved || sim_state.host_bytes)
        fprintf(stderr,
                "simulated GPU: in use at the end in the process: %llu reservations, %llu bytes of pinned host memory\n",
                (unsigned long long)sim_state.reserved, (unsigned long long)sim_state.host_bytes);
    if (clean) fprintf(stderr, "simulated GPU: nothing in use at the end\n");
}

static const uint64_t default_poison_limit = (uint64_t)8 << 20;
static const uint64_t default_nccl_bytes = (uint64_t)16 << 20;

/* The defaults of all settings, before the environment is read. */
static void set_defaults(void) {
    sim_state.epoch++;
    sim_state.initialized = false;
    sim_state.deinitialized = false;
    sim_state.stopping = false;
    sim_state.machine_count = 1;
    sim_visible_all();
    sim_state.bandwidth = 0;
    sim_state.peer_capable = true;
    sim_state.tracing = false;
    sim_state.failures = 0;
    sim_state.illegal_access[0] = '\0';
    atomic_store(&sim_state.illegal_access_read, false);
    sim_table_release(&sim_state.kernels_refused);
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
    sim_state.nccl_bytes = default_nccl_bytes;
    set_defaults();
    sim_environment_read();
    sim_budget_attach();
    atomic_store(&sim_state.pid, getpid());
}

bool sim_life_enter(void) {
    if (sim_state_forked()) return false;
    pthread_mutex_lock(&sim_state.lock);
    if (atomic_load_explicit(&sim_state.pid, memory_order_relaxed) == 0) set_up();
    return true;
}

void sim_life_leave(void) { pthread_mutex_unlock(&sim_state.lock); }

/* Frees every object. */
static void clear(void) {
    sim_stream_clear();
    sim_capture_clear();
    sim_graph_clear();
    sim_nccl_clear();
    sim_module_clear();
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
    if (!sim_life_enter()) return;
    clear();
    set_defaults();
    sim_call_clear();
    sim_state.machine_count = devices < 0 ? 0 : devices > TMS_SIM_MAX_DEVICES ? TMS_SIM_MAX_DEVICES : devices;
    sim_visible_all();
    sim_state.device_bytes = memory_bytes;
    sim_life_leave();
}

void tms_sim_deinitialize(void) {
    if (!sim_life_enter()) return;
    sim_state.deinitialized = true;
    sim_state_changed();
    sim_life_leave();
}

/* Shutdown at process exit or unload. Later calls of other threads return CUDA_ERROR_DEINITIALIZED. Mappings remain,
 * because such a thread may be reading them. */
__attribute__((destructor)) static void tear_down(void) {
    if (atomic_load(&sim_state.pid) == 0 || sim_state_forked()) return;
    pthread_mutex_lock(&sim_state.lock);
    sim_state.deinitialized = true;
    sim_access_end();
    if (sim_state.report) report();
    sim_stream_clear();
    sim_budget_detach();
    if (sim_state.trace_file >= 0) close(sim_state.trace_file);
    sim_state.trace_file = -1;
    pthread_mutex_unlock(&sim_state.lock);
}
