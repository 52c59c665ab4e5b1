/* Kernels: launches, attributes, and how many blocks fit on a multiprocessor. A launch looks up the kernel by its name. The
 * few kernels that are implemented here read their arguments during the call, because they are valid only then. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/devices/device.h"
#include "simulator/runtime/entries.h"
#include "simulator/runtime/registry.h"
#include "simulator/simulator.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"

enum { CALL_CONFIGURATIONS = 8 }; /* nested launch configurations per thread */

/* __cxa_demangle, if the program has loaded a C++ library. */
typedef char *demangle_t(const char *mangled, char *text, size_t *bytes, int *status);

/* Reports a kernel once, because a program may launch it many times. */
static void report_refused(const char *mangled) {
    uint64_t key = (uintptr_t)mangled;
    if (sim_table_find(&sim_state.kernels_refused, key)) return;
    sim_table_insert(&sim_state.kernels_refused, key, &sim_state);
    demangle_t *demangle = (demangle_t *)dlsym(RTLD_DEFAULT, "__cxa_demangle");
    char *text = demangle ? demangle(mangled, NULL, NULL, NULL) : NULL;
    fprintf(stderr,
            "simulated GPU: the launch of a kernel failed, because only PyTorch's operators are simulated and no other "
            "kernels: %s\n",
            text ? text : mangled);
    free(text);
}

/* Occupies the stream for as many cycles as the argument says: torch.cuda._sleep. */
static CUresult sleep_for(sim_stream_t *stream, void *const *arguments) {
    static const uint64_t nanoseconds = 1000000; /* per millisecond, in which a clock of 1 kHz has one cycle */
    int64_t cycles = 0;
    memcpy(&cycles, arguments[0], sizeof cycles);
    uint64_t clock = (uint64_t)sim_device_value(CU_DEVICE_ATTRIBUTE_CLOCK_RATE, stream->context->device);
    uint64_t length =
        cycles > 0 ? (uint64_t)cycles / clock * nanoseconds + (uint64_t)cycles % clock * nanoseconds / clock : 0;
    const sim_op_t op = {.kind = SIM_OP_SLEEP, .nanoseconds = length};
    return sim_stream_submit(stream, &op, NULL);
}

/* Keeps the state of PyTorch's generator, which is the second argument, and computes nothing: see tms_sim_begin_draw. The
 * addend of a captured state has 32 or 64 bits, of which the lower ones are used. */
static CUresult keep_draw(sim_stream_t *stream, void *const *arguments) {
    sim_thread_t *thread = sim_state_thread();
    const uint8_t *generator = arguments[1];
    uint64_t words[2];
    uint32_t addend = 0;
    if (!thread->draws) return CUDA_ERROR_NOT_SUPPORTED;
    bool captured = sim_capture_state(stream) != CU_STREAM_CAPTURE_STATUS_NONE;
    memcpy(words, generator, sizeof words);
    if (captured) memcpy(&addend, generator + sizeof words, sizeof addend);
    thread->draw = (tms_sim_draw_t){.seed = words[0], .offset = words[1], .addend = addend, .captured = captured};
    thread->drawn = true;
    return CUDA_SUCCESS;
}

/* The kernels that are implemented here, by a part of their mangled names: the length of a function's name, and the name. */
static const struct {
    const char *name;
    CUresult (*launch)(sim_stream_t *stream, void *const *arguments);
} kernels[] = {
    {"11spin_kernel", sleep_for},
    {"43distribution_elementwise_grid_stride_kernel", keep_draw},
};

static CUresult launch(const void *function, void *const *arguments, CUstream handle) {
    const char *mangled = sim_kernel_registered(function);
    sim_stream_t *stream = sim_stream_find(handle);
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    if (!mangled) return (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        if (!strstr(mangled, kernels[i].name)) continue;
        result = arguments ? kernels[i].launch(stream, arguments) : CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_ERROR_NOT_SUPPORTED) report_refused(mangled);
    return result;
}

CUresult sim_kernel_launch(const void *function, sim_dim3_t grid, sim_dim3_t block, void **arguments, size_t shared_bytes,
                           CUstream stream) {
    (void)shared_bytes;
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return (CUresult)SIM_ERROR_INVALID_CONFIGURATION;
    return launch(function, arguments, stream);
}

CUresult sim_kernel_launch_configured(const sim_launch_config_t *config, const void *function, void **arguments) {
    if (!config) return CUDA_ERROR_INVALID_VALUE;
    return sim_kernel_launch(function, config->grid, config->block, arguments, config->shared_bytes, config->stream);
}

CUresult sim_kernel_get(const void **kernel, const void *function) {
    if (!kernel) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_kernel_registered(function)) return (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
    *kernel = function;
    return CUDA_SUCCESS;
}

/* All kernels report the same moderate resource usage. */
CUresult sim_function_attributes(sim_function_attributes_t *to, const void *function) {
    enum { REGISTERS = 32, VERSION = 90 };
    if (!to) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_kernel_registered(function)) return (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
    *to = (sim_function_attributes_t){
        .max_threads_per_block = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0),
        .registers = REGISTERS,
        .ptx_version = VERSION,
        .binary_version = VERSION,
        .max_dynamic_shared_bytes = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 0),
        .preferred_carveout = -1,
    };
    return CUDA_SUCCESS;
}

CUresult sim_function_set_attribute(const void *function, int attribute, int value) {
    (void)attribute;
    (void)value;
    return sim_kernel_registered(function) ? CUDA_SUCCESS : (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
}

CUresult sim_function_occupancy(int *blocks, const void *function, int threads, size_t shared_bytes) {
    int most = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 0);
    int room = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 0);
    size_t shared = (size_t)sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 0);
    if (!blocks || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_kernel_registered(function)) return (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
    *blocks = room / threads < most ? room / threads : most;
    if (shared_bytes && shared / shared_bytes < (size_t)*blocks) *blocks = (int)(shared / shared_bytes);
    return CUDA_SUCCESS;
}

CUresult sim_function_occupancy_flags(int *blocks, const void *function, int threads, size_t shared_bytes,
                                      unsigned int flags) {
    (void)flags;
    return sim_function_occupancy(blocks, function, threads, shared_bytes);
}

/* A kernel<<<...>>> call stores its configuration here for the stub that launches it. Thread-local, so it needs no lock. */
typedef struct configuration {
    sim_dim3_t grid, block;
    size_t shared_bytes;
    void *stream;
} configuration_t;

static _Thread_local struct {
    configuration_t stack[CALL_CONFIGURATIONS];
    unsigned depth;
} prepared;

TMS_SIM_EXPORT unsigned int __cudaPushCallConfiguration(sim_dim3_t grid, sim_dim3_t block, size_t shared_bytes,
                                                        void *stream);
TMS_SIM_EXPORT CUresult __cudaPopCallConfiguration(sim_dim3_t *grid, sim_dim3_t *block, size_t *shared_bytes, void *stream);

/* A result other than 0 prevents the launch. */
unsigned int __cudaPushCallConfiguration(sim_dim3_t grid, sim_dim3_t block, size_t shared_bytes, void *stream) {
    if (prepared.depth == CALL_CONFIGURATIONS) return 1;
    prepared.stack[prepared.depth++] = (configuration_t){grid, block, shared_bytes, stream};
    return 0;
}

/* `stream` points to a stream. */
CUresult __cudaPopCallConfiguration(sim_dim3_t *grid, sim_dim3_t *block, size_t *shared_bytes, void *stream) {
    if (!prepared.depth) return (CUresult)SIM_ERROR_MISSING_CONFIGURATION;
    const configuration_t *top = &prepared.stack[--prepared.depth];
    *grid = top->grid;
    *block = top->block;
    *shared_bytes = top->shared_bytes;
    *(void **)stream = top->stream;
    return CUDA_SUCCESS;
}
