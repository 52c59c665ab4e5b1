/* Modules of the driver, and the launch of a kernel in one. The only kernel that is implemented is tms_fingerprint
 * (include/tms_fingerprint.h), which a module must declare. A module belongs to the context in which it was loaded, and
 * ends with it. Its global is device memory of that context, and is not charged. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/tms_fingerprint.h"
#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/contexts/entries.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/context.h"
#include "simulator/memory/access.h"
#include "simulator/memory/host.h"
#include "simulator/memory/mapping.h"
#include "simulator/runtime/entries.h"
#include "simulator/runtime/modules.h"
#include "simulator/simulator.h"
#include "simulator/streams/stream.h"
#include "simulator/work/op.h"

static const char kernel_name[] = "tms_fingerprint", key_name[] = "tms_fingerprint_key";
static const char kernel_entry[] = ".entry tms_fingerprint(";

typedef struct module {
    uint64_t id, function; /* the handles of the module and of its kernel */
    const sim_context_t *context;
    uint64_t activation; /* the context's, when the module was loaded */
    CUdeviceptr key;
} module_t;

static bool is_alive(const module_t *module) {
    return module->context->alive && module->context->activation == module->activation;
}

static module_t *find_module(CUmodule handle) {
    module_t *module = sim_table_find(&sim_state.modules, (uint64_t)(uintptr_t)handle);
    return module && is_alive(module) ? module : NULL;
}

static module_t *find_function(CUfunction handle) {
    for (size_t i = 0; i < sim_state.modules.count; i++) {
        module_t *module = sim_state.modules.slots[i].value;
        if (module->function == (uint64_t)(uintptr_t)handle && is_alive(module)) return module;
    }
    return NULL;
}

/* Allocates the global of a module. A full device has no room for it. */
static CUresult allocate_key(module_t *module) {
    CUresult result = sim_device_memory_allocate(&module->key, sizeof(tms_fingerprint_key_t));
    if (result != CUDA_SUCCESS) return result;
    sim_physical_t *physical = sim_memory_mapping_at(module->key)->physical;
    physical->module = true;
    sim_budget_credit(physical->device, physical->bytes, false);
    sim_state.devices[physical->device].runtime_allocations--;
    return CUDA_SUCCESS;
}

/* The image is PTX, which the driver compiles. */
CUresult sim_module_load(CUmodule *handle, const void *image) {
    const char *disabled = getenv("CUDA_DISABLE_PTX_JIT");
    const sim_context_t *context = sim_context_current();
    if (!handle || !image) return CUDA_ERROR_INVALID_VALUE;
    if (disabled && strcmp(disabled, "1") == 0) return CUDA_ERROR_JIT_COMPILATION_DISABLED;
    if (!strstr(image, kernel_entry)) {
        fprintf(stderr, "simulated GPU: a module could not be loaded, because its kernels are not simulated\n");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    module_t *module = calloc(1, sizeof *module);
    if (!module) return CUDA_ERROR_OUT_OF_MEMORY;
    *module = (module_t){
        .id = sim_state_new_id(), .function = sim_state_new_id(), .context = context, .activation = context->activation};
    CUresult result = allocate_key(module);
    if (result == CUDA_SUCCESS && !sim_table_insert(&sim_state.modules, module->id, module)) {
        (void)sim_device_memory_free(module->key);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        *handle = (CUmodule)(uintptr_t)module->id;
    else
        free(module);
    return result;
}

CUresult sim_module_unload(CUmodule handle) {
    module_t *module = find_module(handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sim_device_memory_free(module->key);
    if (result != CUDA_SUCCESS) return result;
    free(sim_table_remove(&sim_state.modules, (uint64_t)(uintptr_t)handle));
    return CUDA_SUCCESS;
}

CUresult sim_module_function(CUfunction *function, CUmodule handle, const char *name) {
    const module_t *module = find_module(handle);
    if (!function || !name) return CUDA_ERROR_INVALID_VALUE;
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    if (strcmp(name, kernel_name) != 0) return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)(uintptr_t)module->function;
    return CUDA_SUCCESS;
}

CUresult sim_module_global(CUdeviceptr *address, size_t *bytes, CUmodule handle, const char *name) {
    const module_t *module = find_module(handle);
    if (!name) return CUDA_ERROR_INVALID_VALUE;
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    if (strcmp(name, key_name) != 0) return CUDA_ERROR_NOT_FOUND;
    if (address) *address = module->key;
    if (bytes) *bytes = sizeof(tms_fingerprint_key_t);
    return CUDA_SUCCESS;
}

void sim_module_clear(void) {
    for (size_t i = 0; i < sim_state.modules.count; i++) free(sim_state.modules.slots[i].value);
    sim_table_release(&sim_state.modules);
}

/* ---- the kernel ---- */

typedef struct pass {
    sim_task_t task; /* must be first */
    CUdeviceptr key;
    const tms_fingerprint_chunk_t *chunks;
    tms_fingerprint_t *results;
    uint32_t count;
} pass_t;

/* Computes the fingerprint of a chunk, whose memory may have several mappings. The lock is released while it runs. */
static CUresult compute(const sim_context_t *context, const pass_t *pass, uint32_t index) {
    enum { MAX_MAPPINGS = 2 }; /* a chunk is smaller than the smallest mapping */
    const tms_fingerprint_chunk_t chunk = pass->chunks[index];
    sim_mapping_t *mappings[MAX_MAPPINGS];
    int count = 0;
    CUresult result = chunk.bytes % TMS_FINGERPRINT_VECTOR_BYTES || chunk.bytes > TMS_FINGERPRINT_CHUNK_BYTES
                          ? CUDA_ERROR_ILLEGAL_ADDRESS
                          : CUDA_SUCCESS;
    for (uint64_t done = 0, bytes; result == CUDA_SUCCESS && done < chunk.bytes; done += bytes) {
        bytes = chunk.bytes - done;
        sim_mapping_t *mapping = sim_memory_pin(chunk.address + done, &bytes, 1U << context->device, false, context);
        if (mapping)
            mappings[count++] = mapping;
        else
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (result == CUDA_SUCCESS) {
        pthread_mutex_unlock(&sim_state.lock);
        sim_memory_populate(chunk.address, chunk.bytes, false);
        tms_sim_fingerprint((const void *)(uintptr_t)pass->key, (const void *)(uintptr_t)chunk.address, chunk.bytes,
                            pass->results[index].words);
        pthread_mutex_lock(&sim_state.lock);
    }
    while (count > 0) sim_memory_unpin(mappings[--count]);
    return result;
}

/* Whether the device can access host memory, which may consist of several pinned blocks. */
static bool is_pinned(const void *memory, uint64_t bytes) {
    const uint64_t end = (uintptr_t)memory + bytes;
    for (uint64_t address = (uintptr_t)memory; address < end;) {
        const sim_host_t *host = sim_host_at(address);
        if (!host) return false;
        address = host->address + host->bytes;
    }
    return true;
}

static CUresult work(sim_stream_t *stream, sim_task_t *task) {
    const pass_t *pass = (const pass_t *)task;
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < pass->count && sim_state_may_continue(stream);) {
        if (sim_state.unmapping) {
            pthread_cond_wait(&sim_state.changed, &sim_state.lock);
            continue;
        }
        if (!is_pinned(pass->chunks, pass->count * sizeof *pass->chunks) ||
            !is_pinned(pass->results, pass->count * sizeof *pass->results))
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        result = compute(stream->context, pass, i++);
    }
    return result;
}

static void destroy(sim_task_t *task) { free(task); }

CUresult sim_module_launch(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                           unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                           CUstream handle, void **parameters, void **extra) {
    const module_t *module = find_function(function);
    sim_stream_t *stream = sim_stream_find(handle);
    if (!module || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->context != module->context) return CUDA_ERROR_INVALID_CONTEXT;
    if (!parameters || extra || shared_bytes || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1)
        return CUDA_ERROR_INVALID_VALUE;
    pass_t *pass = calloc(1, sizeof *pass);
    if (!pass) return CUDA_ERROR_OUT_OF_MEMORY;
    pass->task = (sim_task_t){.references = 1, .name = "the kernel tms_fingerprint", .work = work, .destroy = destroy};
    pass->key = module->key;
    pass->chunks = *(const tms_fingerprint_chunk_t *const *)parameters[0];
    pass->count = *(const uint32_t *)parameters[1];
    pass->results = *(tms_fingerprint_t *const *)parameters[2];
    const uint64_t groups = ((uint64_t)pass->count + TMS_FINGERPRINT_GROUP - 1) / TMS_FINGERPRINT_GROUP;
    const sim_op_t op = {.kind = SIM_OP_TASK, .task = &pass->task};
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (block_x == TMS_FINGERPRINT_THREADS && grid_x == groups && grid_x > 0) result = sim_stream_submit(stream, &op, NULL);
    sim_task_release(&pass->task);
    return result;
}
