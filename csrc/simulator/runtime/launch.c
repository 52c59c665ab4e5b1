/* Kernel launches. The call looks up the kernel by name and copies its arguments, which are valid only during the call. A
 * stream executes the rest. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/devices/attributes.h"
#include "simulator/kernels/kernel.h"
#include "simulator/runtime/entries.h"
#include "simulator/simulator.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"

enum { CALL_CONFIGURATIONS = 8 }; /* nested launch configurations per thread */

/* __cxa_demangle, if the program has loaded a C++ library. */
typedef char *demangle_t(const char *mangled, char *text, size_t *bytes, int *status);

/* Reports a kernel once, because a program may launch it many times. */
static void report_kernel(const char *mangled, const char *message) {
    uint64_t key = (uintptr_t)mangled;
    if (sim_table_find(&sim_state.kernels_named, key)) return;
    sim_table_insert(&sim_state.kernels_named, key, &sim_state);
    demangle_t *demangle = (demangle_t *)dlsym(RTLD_DEFAULT, "__cxa_demangle");
    char *text = demangle ? demangle(mangled, NULL, NULL, NULL) : NULL;
    fprintf(stderr, "simulated GPU: %s: %s\n", message, text ? text : mangled);
    free(text);
}

/* Handles a kernel that is not interpreted: skips it or fails. */
static CUresult refuse(const char *mangled) {
    if (sim_state.skip_kernels) {
        sim_state.kernels_skipped++;
        report_kernel(mangled, "skipped a kernel that cannot be interpreted");
        return CUDA_SUCCESS;
    }
    report_kernel(mangled, "launch of a kernel that cannot be interpreted (TMS_SIMULATED_KERNELS=skip skips such kernels)");
    return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult submit(sim_stream_t *stream, const sim_op_t *op) {
    CUresult result = sim_stream_submit(stream, op, NULL);
    if (result == CUDA_SUCCESS) sim_state.kernels_launched++;
    return result;
}

static CUresult sleep_for(sim_stream_t *stream, void *const *arguments) {
    static const uint64_t nanoseconds = 1000000; /* per millisecond, in which a clock of 1 kHz has one cycle */
    int64_t cycles = 0;
    memcpy(&cycles, arguments[0], sizeof cycles);
    uint64_t clock = (uint64_t)sim_device_value(CU_DEVICE_ATTRIBUTE_CLOCK_RATE, stream->context->device);
    uint64_t length =
        cycles > 0 ? (uint64_t)cycles / clock * nanoseconds + (uint64_t)cycles % clock * nanoseconds / clock : 0;
    const sim_op_t op = {.kind = SIM_OP_SLEEP, .nanoseconds = length};
    return submit(stream, &op);
}

/* Keeps what a random kernel would draw from instead of running it. */
static CUresult keep_draw(sim_thread_t *thread, const sim_kernel_t *kernel) {
    thread->draw = kernel->draw;
    thread->drawn = true;
    return CUDA_SUCCESS;
}

static CUresult launch(const void *function, void *const *arguments, CUstream handle) {
    const char *mangled = sim_kernel_registered(function);
    sim_stream_t *stream = sim_stream_find(handle);
    sim_thread_t *thread = sim_state_thread();
    sim_kernel_name_t name;
    bool understood = false;
    if (!mangled) return (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    bool sleeps = sim_kernel_sleeps(mangled);
    if (!sleeps && !sim_kernel_parse(mangled, &name)) return refuse(mangled);
    if (!arguments) return CUDA_ERROR_INVALID_VALUE;
    if (sleeps) return sleep_for(stream, arguments);
    bool captured = sim_capture_state(stream) != CU_STREAM_CAPTURE_STATUS_NONE;
    sim_kernel_t *kernel = sim_kernel_new(&name, arguments, captured, &understood);
    if (!understood) return refuse(mangled);
    if (!kernel) return CUDA_ERROR_OUT_OF_MEMORY;
    const sim_op_t op = {.kind = SIM_OP_KERNEL, .kernel = kernel};
    bool draws = thread->draws && name.shape == SIM_SHAPE_RANDOM;
    CUresult result = draws ? keep_draw(thread, kernel) : submit(stream, &op);
    sim_kernel_release(kernel);
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
