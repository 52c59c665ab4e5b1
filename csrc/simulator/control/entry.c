/* The exported functions: each counts its call, writes the trace, fails where it was told to, checks what it needs, and
 * calls its implementation with the lock held. */
#include "simulator/control/entry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulator/base/entry_list.h"
#include "simulator/base/state.h"
#include "simulator/contexts/entries.h"
#include "simulator/control/all_entries.h"
#include "simulator/control/entries.h"
#include "simulator/control/life.h"
#include "simulator/devices/context.h"
#include "simulator/devices/entries.h"
#include "simulator/graphs/entries.h"
#include "simulator/runtime/entries.h"
#include "simulator/simulator.h"
#include "simulator/work/capture.h"

typedef struct sim_call_info {
    const char *symbol;
    unsigned checks;
    bool driver;
    void *address;
} sim_call_info_t;

_Static_assert((int)SIM_CALL_COUNT <= (int)SIM_CALL_LIMIT, "the state has room for the counts of all");

static const sim_call_info_t calls[SIM_CALL_COUNT];

/* The length of a symbol without its ABI suffix: cuMemGetInfo_v2, cudaStreamEndCapture_ptsz. */
static size_t base_length(const char *symbol) {
    static const char *const suffixes[] = {"_v2", "_v3", "_v4", "_ptsz"};
    const char *suffix = strrchr(symbol, '_');
    for (size_t i = 0; suffix && i < sizeof suffixes / sizeof *suffixes; i++) {
        if (strcmp(suffix, suffixes[i]) == 0) return (size_t)(suffix - symbol);
    }
    return strlen(symbol);
}

/* The release of CUDA from which on cuGetProcAddress gives this symbol for its base name, by cudaTypedefs.h. */
static int offered_since(const char *symbol) {
    enum { CUDA_11_4 = 11040, CUDA_12_5 = 12050 };
    if (strcmp(symbol, "cuCtxCreate_v3") == 0) return CUDA_11_4;
    return strcmp(symbol, "cuCtxCreate_v4") == 0 ? CUDA_12_5 : 0;
}

/* The documentation calls it cuGraphInstantiate; only the symbol is longer. */
static bool is_named(const char *symbol, const char *name) {
    size_t length = base_length(symbol), wanted = base_length(name);
    if (strcmp(symbol, "cuGraphInstantiateWithFlags") == 0 && strcmp(name, "cuGraphInstantiate") == 0) return true;
    return length == wanted && strncmp(symbol, name, length) == 0;
}

static void write_trace(sim_call_t call) {
    const char *symbol = calls[call].symbol;
    if (sim_state.trace_file >= 0) {
        char line[SIM_NAME_BYTES];
        int length = snprintf(line, sizeof line, "%.*s\n", (int)base_length(symbol), symbol);
        /* A trace that cannot be written must not change what the program sees. */
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

/* Whether a rule fires now, counting down. */
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
    const sim_call_info_t *info = &calls[call];
    if (fires(&sim_state.faults[call])) return (CUresult)sim_state.faults[call].code;
    if (info->driver && !(info->checks & SIM_PURE) && fires(&sim_state.fault_any)) return (CUresult)sim_state.fault_any.code;
    return CUDA_SUCCESS;
}

static CUresult check(unsigned checks) {
    CUresult result = CUDA_SUCCESS;
    if (checks & SIM_PURE) return CUDA_SUCCESS;
    if (sim_state.deinitialized) return CUDA_ERROR_DEINITIALIZED;
    if (sim_state_thread()->calls_back) return CUDA_ERROR_NOT_PERMITTED;
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

/* `locked` is false in a forked child, where next to nothing works and nothing is counted. */
static CUresult begin_call(sim_call_t call, bool *locked) {
    *locked = sim_life_enter();
    if (!*locked) return calls[call].checks & (SIM_PURE | SIM_FORKED) ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    sim_state.counts[call]++;
    write_trace(call);
    CUresult result = inject(call);
    return result == CUDA_SUCCESS ? check(calls[call].checks) : result;
}

static CUresult end_call(sim_call_t call, bool locked, CUresult result) {
    if (!locked) return result;
    if (!calls[call].driver && result != CUDA_SUCCESS) sim_state_thread()->last_error = (int)result;
    sim_life_leave();
    return result;
}

/* The static twin is what cuGetProcAddress hands out: the address of the exported name could be another library's. */
#define DEFINE(symbol, implementation, checks, parameters, arguments)                                                       \
    static CUresult call_##symbol parameters {                                                                              \
        bool locked = false;                                                                                                \
        CUresult result = begin_call(SIM_CALL_##symbol, &locked);                                                           \
        if (result == CUDA_SUCCESS) result = implementation arguments;                                                      \
        return end_call(SIM_CALL_##symbol, locked, result);                                                                 \
    }                                                                                                                       \
    TMS_SIM_EXPORT CUresult symbol parameters;                                                                              \
    CUresult symbol parameters { return call_##symbol arguments; }
SIM_DRIVER_ENTRIES(DEFINE)
SIM_RUNTIME_ENTRIES(DEFINE)

#define DRIVER_INFO(symbol, implementation, checks, parameters, arguments) {#symbol, (checks), true, (void *)call_##symbol},
#define RUNTIME_INFO(symbol, implementation, checks, parameters, arguments)                                                 \
    {#symbol, (checks), false, (void *)call_##symbol},
static const sim_call_info_t calls[SIM_CALL_COUNT] = {SIM_DRIVER_ENTRIES(DRIVER_INFO) SIM_RUNTIME_ENTRIES(RUNTIME_INFO)};

CUresult sim_entry_address(const char *symbol, void **function, int version, cuuint64_t flags,
                           CUdriverProcAddressQueryResult *status) {
    int best = -1;
    (void)flags;
    if (!symbol || !function) return CUDA_ERROR_INVALID_VALUE;
    *function = NULL;
    for (size_t i = 0; i < SIM_CALL_COUNT; i++) {
        int since = offered_since(calls[i].symbol);
        if (!calls[i].driver || !is_named(calls[i].symbol, symbol) || since <= best || since > version) continue;
        *function = calls[i].address;
        best = since;
    }
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

int sim_entry_fail_after(const char *name, uint64_t succeed, uint64_t fail, int code) {
    const sim_fault_t fault = {.succeed = succeed, .fail = fail, .code = code};
    bool found = strcmp(name, "*") == 0;
    if (found) sim_state.fault_any = fault;
    for (size_t i = 0; i < SIM_CALL_COUNT && name[0] != '*'; i++) {
        if (!is_named(calls[i].symbol, name)) continue;
        sim_state.faults[i] = fault;
        found = true;
    }
    return found ? 0 : 1;
}

uint64_t sim_entry_count(const char *name) {
    uint64_t count = 0;
    for (size_t i = 0; i < SIM_CALL_COUNT; i++) {
        if (strcmp(name, "*") == 0 || is_named(calls[i].symbol, name)) count += sim_state.counts[i];
    }
    return count;
}

void sim_entry_clear(void) {
    memset(sim_state.counts, 0, sizeof sim_state.counts);
    free(sim_state.trace);
    sim_state.trace = NULL;
    sim_state.trace_count = sim_state.trace_capacity = 0;
}

size_t sim_entry_read_trace(char *text, size_t capacity) {
    size_t length = 0;
    for (size_t i = 0; i < sim_state.trace_count; i++) {
        const char *symbol = calls[sim_state.trace[i]].symbol;
        size_t part = base_length(symbol);
        /* A separator comes before every name but the first. */
        for (size_t at = i ? 0 : 1; at <= part; at++, length++) {
            if (length + 1 < capacity) text[length] = at ? symbol[at - 1] : '\n';
        }
    }
    if (capacity) text[length < capacity ? length : capacity - 1] = '\0';
    return length;
}
