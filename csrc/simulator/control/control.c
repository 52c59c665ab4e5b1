/* The tms_sim_* control functions for tests. In a forked child they have no effect, except tms_sim_calls_in_child. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/control/calls.h"
#include "simulator/control/life.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/context.h"
#include "simulator/devices/device.h"
#include "simulator/memory/physical.h"
#include "simulator/simulator.h"
#include "simulator/streams/stream.h"

void tms_sim_set_bandwidth(uint64_t bytes_per_second) {
    if (!sim_life_enter()) return;
    sim_state.bandwidth = bytes_per_second;
    sim_state_changed(); /* wakes copies that wait at the old bandwidth */
    sim_life_leave();
}

void tms_sim_set_peer_capable(int can) {
    if (!sim_life_enter()) return;
    sim_state.peer_capable = can != 0;
    sim_life_leave();
}

void tms_sim_set_poison_limit(uint64_t bytes) {
    if (!sim_life_enter()) return;
    sim_state.poison_limit = bytes;
    sim_life_leave();
}

/* Like tms_sim_attach_device_process, this must not initialise the state. */
void tms_sim_set_manager(const tms_api_t *manager) { atomic_store(&sim_state.manager, manager); }

int tms_sim_fail_after(const char *call, uint64_t succeed, uint64_t fail, int code) {
    if (!call || !sim_life_enter()) return 1;
    int status = sim_call_fail_after(call, succeed, fail, code);
    sim_life_leave();
    if (status != 0) fprintf(stderr, "simulated GPU: tms_sim_fail_after: unknown function %s\n", call);
    return status;
}

uint64_t tms_sim_failures_fired(void) {
    if (!sim_life_enter()) return 0;
    uint64_t fired = sim_state.failures;
    sim_life_leave();
    return fired;
}

uint64_t tms_sim_calls(const char *call) {
    if (!call || !sim_life_enter()) return 0;
    uint64_t count = sim_call_count(call);
    sim_life_leave();
    return count;
}

uint64_t tms_sim_calls_in_child(void) { return atomic_load(&sim_state.calls_in_child); }

void tms_sim_clear_counts(void) {
    if (!sim_life_enter()) return;
    sim_call_clear();
    sim_life_leave();
}

void tms_sim_trace(int on) {
    if (!sim_life_enter()) return;
    sim_state.tracing = on != 0;
    sim_life_leave();
}

size_t tms_sim_read_trace(char *text, size_t capacity) {
    if (!sim_life_enter()) {
        if (capacity) text[0] = '\0';
        return 0;
    }
    size_t length = sim_call_read_trace(text, capacity);
    sim_life_leave();
    return length;
}

void tms_sim_usage(int device, tms_sim_usage_t *usage) {
    *usage = (tms_sim_usage_t){0};
    if (device < 0 || device >= TMS_SIM_MAX_DEVICES || !sim_life_enter()) return;
    const sim_device_t *from = &sim_state.devices[device];
    sim_memory_sweep();
    *usage = (tms_sim_usage_t){.physical_bytes = from->used,
                               .handles = from->handles,
                               .mappings = from->mappings,
                               .reservations = sim_state.reserved,
                               .host_bytes = sim_state.host_bytes,
                               .streams = from->streams,
                               .runtime_allocations = from->runtime_allocations};
    sim_life_leave();
}

uint64_t tms_sim_events(void) {
    if (!sim_life_enter()) return 0;
    uint64_t count = sim_state.events.count;
    sim_life_leave();
    return count;
}

uint64_t tms_sim_context_references(int device) {
    if (device < 0 || device >= TMS_SIM_MAX_DEVICES || !sim_life_enter()) return 0;
    uint64_t references = sim_state.devices[device].primary.references;
    sim_life_leave();
    return references;
}

int tms_sim_take_memory(int device, int64_t bytes) {
    bool done = false;
    if (!sim_life_enter()) return CUDA_ERROR_OUT_OF_MEMORY;
    if (sim_device_valid(device))
        done = bytes >= 0 ? sim_budget_charge(device, (uint64_t)bytes, true)
                          : sim_budget_credit(device, 0 - (uint64_t)bytes, true);
    sim_life_leave();
    return done ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult launch_add(CUstream handle, const sim_op_t *op) {
    sim_context_t *context = NULL;
    if (sim_state.deinitialized) return CUDA_ERROR_DEINITIALIZED;
    if (!sim_state.initialized) return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = sim_context_require(&context);
    if (result != CUDA_SUCCESS) return result;
    sim_stream_t *stream = sim_stream_find(handle);
    return stream ? sim_stream_submit(stream, op, NULL) : CUDA_ERROR_INVALID_HANDLE;
}

int tms_sim_launch_add(void *stream, uint64_t address, uint64_t bytes, uint8_t value, int gate) {
    const sim_op_t op = {.kind = SIM_OP_ADD,
                         .destination = address,
                         .destination_on_device = true,
                         .bytes = bytes,
                         .value = value,
                         .gate = gate};
    if (!sim_life_enter()) return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = launch_add(stream, &op);
    sim_life_leave();
    return (int)result;
}

void tms_sim_open_gate(int gate) {
    if (!gate || !sim_life_enter()) return;
    uint64_t key = (uint64_t)gate;
    if (!sim_table_find(&sim_state.gates, key)) sim_table_insert(&sim_state.gates, key, &sim_state);
    sim_state_changed();
    sim_life_leave();
}

void tms_sim_wait_until_synchronizing(void) {
    if (!sim_life_enter()) return;
    while (!sim_state.synchronizing && sim_state_wait()) {
    }
    sim_life_leave();
}

void tms_sim_lose_device(int device, int code) {
    if (!sim_life_enter()) return;
    if (sim_device_valid(device)) sim_context_fail(&sim_state.devices[device].primary, (CUresult)code);
    sim_life_leave();
}

int tms_sim_recover(void) {
    CUresult first = CUDA_SUCCESS;
    if (!sim_life_enter()) return CUDA_SUCCESS;
    for (int i = 0; i < TMS_SIM_MAX_DEVICES; i++) {
        sim_device_t *device = &sim_state.devices[i];
        if (first == CUDA_SUCCESS) first = device->lost;
        device->lost = device->primary.error = CUDA_SUCCESS;
    }
    if (first != CUDA_SUCCESS) sim_state.illegal_access[0] = '\0';
    atomic_store(&sim_state.illegal_access_read, false);
    sim_life_leave();
    return (int)first;
}
