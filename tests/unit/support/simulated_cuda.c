#include "simulated_cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "own_process.h"

static void resolve(void *library, const char *name, void *field) {
    void *address = dlsym(library, name);
    if (!address) fail_msg("the simulator lacks %s", name);
    memcpy(field, &address, sizeof address);
}

const simulated_t *simulated(void) {
    static simulated_t table;
    static bool ready;
    if (ready) return &table;
    const char *path = getenv("TMS_CUDA_DRIVER");
    if (!path) fail_msg("TMS_CUDA_DRIVER must name the simulated GPU");
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) fail_msg("%s", dlerror());
#define RESOLVE_ENTRY(symbol, implementation, checks, parameters, arguments) resolve(library, #symbol, &table.symbol);
    SIM_DRIVER_ENTRIES(RESOLVE_ENTRY)
    SIM_RUNTIME_ENTRIES(RESOLVE_ENTRY)
    SIM_NCCL_ENTRIES(RESOLVE_ENTRY)
#define RESOLVE_CONTROL(name) resolve(library, "tms_sim_" #name, &table.name);
    SIMULATED_CONTROLS(RESOLVE_CONTROL)
    resolve(library, "cudaGetLastError", &table.cudaGetLastError);
    resolve(library, "cudaPeekAtLastError", &table.cudaPeekAtLastError);
    resolve(library, "cudaGetErrorName", &table.cudaGetErrorName);
    resolve(library, "cudaGetErrorString", &table.cudaGetErrorString);
    resolve(library, "ncclGetErrorString", &table.ncclGetErrorString);
    resolve(library, "ncclGetLastError", &table.ncclGetLastError);
    resolve(library, "cublasCreate_v2", &table.cublasCreate_v2);
    resolve(library, "cublasDestroy_v2", &table.cublasDestroy_v2);
    resolve(library, "cublasSetStream_v2", &table.cublasSetStream_v2);
    resolve(library, "cublasSetWorkspace_v2", &table.cublasSetWorkspace_v2);
    resolve(library, "cublasSetMathMode", &table.cublasSetMathMode);
    ready = true;
    return &table;
}

CUcontext retain_primary(int device) {
    CUcontext context = NULL;
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRetain, &context, device));
    return context;
}

static int set_up(int devices) {
    CALL(reset, devices, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cuInit, 0));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, retain_primary(0)));
    return 0;
}

int setup_one_gpu(void **state) {
    (void)state;
    return set_up(1);
}

int setup_two_gpus(void **state) {
    (void)state;
    return set_up(2);
}

int teardown_gpus(void **state) {
    (void)state;
    for (int device = 0; device < TMS_SIM_MAX_DEVICES; device++) {
        tms_sim_usage_t usage = usage_of(device);
        assert_int_equal(usage.physical_bytes, 0);
        assert_int_equal(usage.handles, 0);
        assert_int_equal(usage.mappings, 0);
        assert_int_equal(usage.reservations, 0);
        assert_int_equal(usage.host_bytes, 0);
        assert_int_equal(usage.streams, 0);
        assert_int_equal(usage.runtime_allocations, 0);
    }
    return 0;
}

CUmemAllocationProp pinned_on(int device) {
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
}

CUmemAccessDesc access_for(int device, CUmemAccess_flags flags) {
    return (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, .flags = flags};
}

block_t make_block(int device, uint64_t bytes) {
    block_t block = {.bytes = bytes};
    CUmemAllocationProp properties = pinned_on(device);
    CUmemAccessDesc access = access_for(device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    ASSERT_CUDA(CALL(cuMemAddressReserve, &block.address, bytes, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemCreate, &block.handle, bytes, &properties, 0));
    ASSERT_CUDA(CALL(cuMemMap, block.address, bytes, 0, block.handle, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, bytes, &access, 1));
    return block;
}

void unmap_block(const block_t *block) {
    ASSERT_CUDA(CALL(cuMemUnmap, block->address, block->bytes));
    ASSERT_CUDA(CALL(cuMemRelease, block->handle));
}

void drop_block(const block_t *block) {
    unmap_block(block);
    ASSERT_CUDA(CALL(cuMemAddressFree, block->address, block->bytes));
}

void assert_bytes(CUdeviceptr address, uint64_t bytes, uint8_t value) {
    const uint8_t *memory = (const uint8_t *)(uintptr_t)address;
    for (uint64_t i = 0; i < bytes; i++) {
        if (memory[i] != value) fail_msg("byte %llu is %#x and not %#x", (unsigned long long)i, memory[i], value);
    }
}

tms_sim_usage_t usage_of(int device) {
    tms_sim_usage_t usage;
    CALL(usage, device, &usage);
    return usage;
}

static void become(const char *role, const char *const *variables, int output) {
    dup2(output, STDERR_FILENO);
    for (; *variables; variables++) putenv((char *)*variables);
    execute_again(role);
    _exit(127);
}

int run_again(const char *role, const char *const *variables, char *output, size_t capacity) {
    int ends[2], status = 0;
    size_t length = 0;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) become(role, variables, ends[1]);
    close(ends[1]);
    for (ssize_t got = 1; got > 0 && length + 1 < capacity; length += got > 0 ? (size_t)got : 0)
        got = read(ends[0], output + length, capacity - length - 1);
    output[length] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}
