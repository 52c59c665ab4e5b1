#include "simulator/control/calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulator/base/entry_list.h"
#include "simulator/base/simulation.h"
#include "simulator/devices/context.h"
#include "simulator/devices/entries.h"
#include "simulator/work/capture.h"

_Static_assert((int)SIM_CALL_COUNT <= (int)SIM_CALL_LIMIT, "the state has a counter for every entry point");

#define DRIVER_INFO(symbol, implementation, checks, parameters, arguments)  {#symbol, (checks), true},
#define RUNTIME_INFO(symbol, implementation, checks, parameters, arguments) {#symbol, (checks), false},
const sim_call_info_t sim_calls[SIM_CALL_COUNT] = {SIM_DRIVER_ENTRIES(DRIVER_INFO) SIM_RUNTIME_ENTRIES(RUNTIME_INFO)
                                                       SIM_NCCL_ENTRIES(RUNTIME_INFO)};

/* The length of a symbol without its ABI suffix: cuMemGetInfo_v2, cudaStreamEndCapture_ptsz. */
static size_t base_length(const char *symbol) {
    static const char *const suffixes[] = {"_v2", "_v3", "_v4", "_ptsz"};
    const char *suffix = strrchr(symbol, '_');
    for (size_t i = 0; suffix && i < sizeof suffixes / sizeof *suffixes; i++) {
        if (strcmp(suffix, suffixes[i]) == 0) return (size_t)(suffix - symbol);
    }
    return strlen(symbol);
}

/* The documented name is cuGraphInstantiate; only the symbol is longer. */
bool sim_call_is_named(const char *symbol, const char *name) {
    size_t length = base_length(symbol), wanted = base_length(name);
    if (strcmp(symbol, "cuGraphInstantiateWithFlags") == 0 && strcmp(name, "cuGraphInstantiate") == 0) return true;
    return length == wanted && strncmp(symbol, name, length) == 0;
}

static void write_trace(sim_call_t call) {
    const char *symbol = sim_calls[call].symbol;
    if (sim_state.trace_file >= 0) {
        char line[SIM_NAME_BYTES];
        int length = snprintf(line, sizeof line, "%.*s\n", (int)base_length(symbol), symbol);
        /* An error of the trace file must not affect the program. */
        if (write(sim_state.trace_file, line, (size_t)length) < 0) sim_state.trace_file = -1;
    }
    if (!sim_state.tracing) return;
    if (sim_state.trace_count == sim_state.trace_capacity) {
        size_t capacity = sim_state.trace_capacity ? 2 * sim_state.trace_capacity : SIM_NAME_BYTES;
        uint16_t *grown = realloc(sim_state.trace, capacity * sizeof *grown);
        if (!grown) return;
        sim_state.trace = grown;
        sim_state.trace_capacity = capacity;
    }
    sim_state.trace[sim_state.trace_count++] = (uint16_t)call;
}

/* Whether a rule fails this call. Counts the rule down. */
static bool fires(sim_fault_t *fault) {
    if (!fault->fail) return false;
    if (fault->succeed) {
        fault->succeed--;
        return false;
    }
    fault->fail--;
    sim_state.failures++;
    return true;
}

static CUresult inject(sim_call_t call) {
    const sim_call_info_t *info = &sim_calls[call];
    if (fires(&sim_state.faults[call])) return (CUresult)sim_state.faults[call].code;
    if (info->driver && !(info->checks & SIM_PURE) && fires(&sim_state.fault_any)) return (CUresult)sim_state.fault_any.code;
    return CUDA_SUCCESS;
}

CUresult sim_call_begins(sim_call_t call) {
    sim_state.counts[call]++;
    write_trace(call);
    return inject(call);
}

int sim_call_fail_after(const char *name, uint64_t succeed, uint64_t fail, int code) {
    const sim_fault_t fault = {.succeed = succeed, .fail = fail, .code = code};
    bool found = strcmp(name, "*") == 0;
    if (found) sim_state.fault_any = fault;
    for (size_t i = 0; i < SIM_CALL_COUNT && name[0] != '*'; i++) {
        if (!sim_call_is_named(sim_calls[i].symbol, name)) continue;
        sim_state.faults[i] = fault;
        found = true;
    }
    return found ? 0 : 1;
}

uint64_t sim_call_count(const char *name) {
    uint64_t count = 0;
    for (size_t i = 0; i < SIM_CALL_COUNT; i++) {
        if (strcmp(name, "*") == 0 || sim_call_is_named(sim_calls[i].symbol, name)) count += sim_state.counts[i];
    }
    return count;
}

void sim_call_clear(void) {
    memset(sim_state.counts, 0, sizeof sim_state.counts);
    free(sim_state.trace);
    sim_state.trace = NULL;
    sim_state.trace_count = sim_state.trace_capacity = 0;
}

size_t sim_call_read_trace(char *text, size_t capacity) {
    size_t length = 0;
    for (size_t i = 0; i < sim_state.trace_count; i++) {
        const char *symbol = sim_calls[sim_state.trace[i]].symbol;
        size_t part = base_length(symbol);
        /* A separator precedes every name but the first. */
        for (size_t at = i ? 0 : 1; at <= part; at++, length++) {
            if (length + 1 < capacity) text[length] = at ? symbol[at - 1] : '\n';
        }
    }
    if (capacity) text[length < capacity ? length : capacity - 1] = '\0';
    return length;
}

CUresult sim_call_check(unsigned checks) {
    CUresult result = CUDA_SUCCESS;
    if (checks & SIM_PURE) return CUDA_SUCCESS;
    if (sim_state.deinitialized) return CUDA_ERROR_DEINITIALIZED;
    if (sim_state_thread()->in_callback) return CUDA_ERROR_NOT_PERMITTED;
    if (checks & (SIM_DEVICES | SIM_RUNTIME)) result = sim_device_init(0);
    if (result == CUDA_SUCCESS && checks & (SIM_INIT | SIM_CONTEXT | SIM_HEALTHY | SIM_FREEING) && !sim_state.initialized)
        result = CUDA_ERROR_NOT_INITIALIZED;
    if (result == CUDA_SUCCESS && checks & SIM_RUNTIME) result = sim_context_attach_runtime();
    if (result == CUDA_SUCCESS && checks & (SIM_CONTEXT | SIM_RUNTIME)) {
        sim_context_t *context = NULL;
        result = sim_context_require(&context);
    }
    if (result == CUDA_SUCCESS && checks & (SIM_HEALTHY | SIM_FREEING)) {
        const sim_context_t *context = sim_context_current();
        if (context)
            result = context->error;
        else if (checks & SIM_FREEING && sim_state_thread()->depth)
            result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    if (result == CUDA_SUCCESS && checks & SIM_UNSAFE) result = sim_capture_check_unsafe();
    return result;
}
