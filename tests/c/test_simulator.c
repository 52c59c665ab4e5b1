/* The simulated GPU's memory: the driver's rules with its codes, and the bytes behind them. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "simulated_cuda.h"

/* Whether the host may read an address, asked of the kernel so that the test does not have to fault. */
static bool is_readable(CUdeviceptr address) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    bool readable = write(ends[1], (const void *)(uintptr_t)address, 1) == 1;
    if (!readable) assert_int_equal(errno, EFAULT);
    close(ends[0]);
    close(ends[1]);
    return readable;
}

static void nothing_works_before_init(void **state) {
    int count = 0;
    CUdeviceptr address = 0;
    const char *name = NULL;
    (void)state;
    CALL(reset, 1, DEVICE_MEMORY);
    ASSERT_RESULT(CUDA_ERROR_NOT_INITIALIZED, CALL(cuDeviceGetCount, &count));
    ASSERT_RESULT(CUDA_ERROR_NOT_INITIALIZED, CALL(cuMemAddressReserve, &address, GRANULE, 0, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_INITIALIZED, CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuGetErrorName, CUDA_ERROR_OUT_OF_MEMORY, &name));
    assert_string_equal(name, "CUDA_ERROR_OUT_OF_MEMORY");
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuInit, 1));
    ASSERT_CUDA(CALL(cuInit, 0));
    ASSERT_CUDA(CALL(cuDeviceGetCount, &count));
    assert_int_equal(count, 1);
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuCtxSynchronize));
    CALL(reset, 0, DEVICE_MEMORY);
    ASSERT_RESULT(CUDA_ERROR_NO_DEVICE, CALL(cuInit, 0));
}

static void devices_describe_themselves(void **state) {
    int value = 0;
    size_t bytes = 0, available = 0;
    char name[32];
    CUdevice device = -1;
    CUmemAllocationProp properties = pinned_on(0);
    (void)state;
    ASSERT_CUDA(CALL(cuDriverGetVersion, &value));
    assert_int_equal(value, TMS_SIM_DRIVER_VERSION);
    ASSERT_CUDA(CALL(cuDeviceGet, &device, 1));
    assert_int_equal(device, 1);
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cuDeviceGet, &device, 2));
    ASSERT_CUDA(CALL(cuDeviceGetName, name, sizeof name, 0));
    assert_string_equal(name, "Simulated GPU");
    ASSERT_CUDA(CALL(cuDeviceTotalMem_v2, &bytes, 0));
    assert_int_equal(bytes, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cuMemGetInfo_v2, &available, &bytes));
    assert_int_equal(available, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    assert_int_equal(value, 1);
    ASSERT_CUDA(CALL(cuMemGetAllocationGranularity, &bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    assert_int_equal(bytes, GRANULE);
    ASSERT_CUDA(CALL(cuDeviceCanAccessPeer, &value, 0, 1));
    assert_int_equal(value, 1);
    CALL(set_peer_capable, 0);
    ASSERT_CUDA(CALL(cuDeviceCanAccessPeer, &value, 0, 1));
    assert_int_equal(value, 0);
}

static void primary_contexts_are_counted(void **state) {
    CUcontext context = NULL, again = NULL;
    CUdevice device = -1;
    unsigned flags = 0;
    int active = -1;
    (void)state;
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 1, &flags, &active));
    assert_int_equal(active, 0);
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuDevicePrimaryCtxRelease_v2, 1));
    context = retain_primary(1);
    again = retain_primary(1);
    assert_ptr_equal(context, again);
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 1, &flags, &active));
    assert_int_equal(active, 1);
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, context));
    ASSERT_CUDA(CALL(cuCtxGetDevice, &device));
    assert_int_equal(device, 1);
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRelease_v2, 1));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRelease_v2, 1));
    ASSERT_RESULT(CUDA_ERROR_CONTEXT_IS_DESTROYED, CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, &again));
    assert_ptr_equal(context, again);
    ASSERT_CUDA(CALL(cuCtxGetDevice, &device));
    assert_int_equal(device, 0);
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, NULL));
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuCtxPopCurrent_v2, NULL));
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &again));
    assert_null(again);
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cuCtxPushCurrent_v2, context));
}

static void destroying_a_context_frees_its_allocations(void **state) {
    CUdeviceptr address = 0;
    CUstream stream = NULL;
    block_t block = make_block(0, GRANULE);
    (void)state;
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &address, 1));
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, 0));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    assert_int_equal(usage_of(0).runtime_allocations, 0);
    assert_int_equal(usage_of(0).streams, 0);
    assert_int_equal(usage_of(0).physical_bytes, GRANULE); /* virtual memory management belongs to the process */
    drop_block(&block);
}

static void reservations_are_exact(void **state) {
    CUdeviceptr address = 0, other = 0;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressReserve, &address, 0, 0, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressReserve, &address, GRANULE + 1, 0, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressReserve, &address, GRANULE, 3, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemAddressReserve, &address, (uint64_t)1 << 62, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 2 * GRANULE, 16 * GRANULE, 0, 0));
    assert_int_equal(address % (16 * GRANULE), 0);
    assert_false(is_readable(address));
    ASSERT_CUDA(CALL(cuMemAddressReserve, &other, 2 * GRANULE, 0, address, 0)); /* a taken hint is no error */
    assert_int_not_equal(address, other);
    assert_int_equal(usage_of(0).reservations, 2);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address, GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address + GRANULE, GRANULE));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 2 * GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address, 2 * GRANULE));
    CUdeviceptr hinted = 0;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &hinted, 2 * GRANULE, 0, address, 0));
    assert_int_equal(hinted, address);
    ASSERT_CUDA(CALL(cuMemAddressFree, hinted, 2 * GRANULE));
    ASSERT_CUDA(CALL(cuMemAddressFree, other, 2 * GRANULE));
}

static void physical_memory_is_charged(void **state) {
    CUmemGenericAllocationHandle all = 0, more = 0;
    CUmemAllocationProp properties = pinned_on(0), absent = pinned_on(1), host = pinned_on(0);
    size_t available = 0, total = 0;
    (void)state;
    host.location.type = CU_MEM_LOCATION_TYPE_HOST;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemCreate, &all, 0, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemCreate, &all, GRANULE / 2, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemCreate, &all, GRANULE, NULL, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cuMemCreate, &all, GRANULE, &absent, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemCreate, &all, GRANULE, &host, 0));
    ASSERT_CUDA(CALL(cuMemCreate, &all, DEVICE_MEMORY, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemCreate, &more, GRANULE, &properties, 0));
    assert_int_equal(more, 0);
    ASSERT_CUDA(CALL(cuMemGetInfo_v2, &available, &total));
    assert_int_equal(available, 0);
    assert_int_equal(total, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cuMemRelease, all));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemRelease, all));
    ASSERT_CUDA(CALL(cuMemCreate, &more, GRANULE, &properties, 0));
    assert_int_not_equal(all, more);
    ASSERT_CUDA(CALL(cuMemRelease, more));
}

static void memory_taken_by_others_counts(void **state) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    (void)state;
    assert_int_equal(CALL(take_memory, 0, (int64_t)DEVICE_MEMORY), 0);
    assert_int_equal(CALL(take_memory, 0, 1), 2);
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    assert_int_equal(CALL(take_memory, 0, -(int64_t)GRANULE), 0);
    ASSERT_CUDA(CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    assert_int_equal(usage_of(0).physical_bytes, GRANULE);
    ASSERT_CUDA(CALL(cuMemRelease, handle));
    assert_int_equal(CALL(take_memory, 0, -(int64_t)DEVICE_MEMORY), 2);
}

static void mapping_takes_whole_handles_at_granules(void **state) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    CUdeviceptr address = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 4 * GRANULE, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemCreate, &handle, 2 * GRANULE, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemMap, address, GRANULE, GRANULE, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemMap, address, GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address, 4 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address + 4096, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address + 3 * GRANULE, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address, 2 * GRANULE, 0, handle + 1, 0));
    ASSERT_CUDA(CALL(cuMemMap, address, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address + GRANULE, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address, 4 * GRANULE)); /* while mapped */
    assert_false(is_readable(address));                                                  /* no access yet */
    assert_int_equal(usage_of(0).mappings, 1);
    ASSERT_CUDA(CALL(cuMemUnmap, address, 2 * GRANULE));
    ASSERT_CUDA(CALL(cuMemRelease, handle));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 4 * GRANULE));
}

static void one_handle_shows_at_two_addresses(void **state) {
    block_t block = make_block(0, GRANULE);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr alias = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &alias, GRANULE, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemMap, alias, GRANULE, 0, block.handle, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, alias, GRANULE, &access, 1));
    ASSERT_CUDA(CALL(cuMemsetD8_v2, block.address, 7, GRANULE));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_bytes(alias, GRANULE, 7);
    ASSERT_CUDA(CALL(cuMemUnmap, alias, GRANULE));
    assert_bytes(block.address, GRANULE, 7);
    ASSERT_CUDA(CALL(cuMemAddressFree, alias, GRANULE));
    drop_block(&block);
}

static void access_needs_fully_mapped_ranges(void **state) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc write = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemAccessDesc read = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READ), absent = access_for(1, read.flags);
    CUmemLocation location = write.location;
    CUdeviceptr address = 0;
    unsigned long long flags = 99;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 2 * GRANULE, 0, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemSetAccess, address, GRANULE, &write, 1));
    ASSERT_CUDA(CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    ASSERT_CUDA(CALL(cuMemMap, address, GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemSetAccess, address, 2 * GRANULE, &write, 1));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemSetAccess, address, GRANULE, &write, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cuMemSetAccess, address, GRANULE, &absent, 1));
    ASSERT_CUDA(CALL(cuMemGetAccess, &flags, &location, address));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    ASSERT_CUDA(CALL(cuMemSetAccess, address, GRANULE, &read, 1));
    ASSERT_CUDA(CALL(cuMemGetAccess, &flags, &location, address));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_READ);
    assert_bytes(address, GRANULE, TMS_SIM_POISON);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemsetD8_v2, address, 0, 1)); /* readable only */
    ASSERT_CUDA(CALL(cuMemSetAccess, address, GRANULE, &write, 1));
    ASSERT_CUDA(CALL(cuMemsetD8_v2, address, 0, 1));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemGetAccess, &flags, &location, address + GRANULE));
    ASSERT_CUDA(CALL(cuMemUnmap, address, GRANULE));
    ASSERT_CUDA(CALL(cuMemRelease, handle));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 2 * GRANULE));
}

static void unmapping_takes_whole_mappings(void **state) {
    enum { PIECES = 3 };
    CUmemGenericAllocationHandle handle[PIECES];
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr address = 0;
    const uint64_t piece = 2 * GRANULE, bytes = PIECES * piece;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, bytes, 0, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, piece));
    for (int i = 0; i < PIECES; i++) {
        ASSERT_CUDA(CALL(cuMemCreate, &handle[i], piece, &properties, 0));
        ASSERT_CUDA(CALL(cuMemMap, address + (uint64_t)i * piece, piece, 0, handle[i], 0));
    }
    ASSERT_CUDA(CALL(cuMemSetAccess, address, bytes, &access, 1)); /* one call over several handles */
    assert_bytes(address, bytes, TMS_SIM_POISON);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address + GRANULE, piece));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, piece + GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, 0));
    assert_int_equal(usage_of(0).mappings, PIECES);
    ASSERT_CUDA(CALL(cuMemUnmap, address + piece, piece));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, bytes)); /* a hole */
    assert_int_equal(usage_of(0).mappings, PIECES - 1);
    ASSERT_CUDA(CALL(cuMemMap, address + piece, piece, 0, handle[1], 0));
    ASSERT_CUDA(CALL(cuMemUnmap, address, bytes)); /* one call over several handles */
    assert_int_equal(usage_of(0).mappings, 0);
    assert_false(is_readable(address));
    for (int i = 0; i < PIECES; i++) ASSERT_CUDA(CALL(cuMemRelease, handle[i]));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, bytes));
}

static void memory_is_free_when_unmapped_and_released(void **state) {
    block_t block = make_block(0, 2 * GRANULE);
    CUmemGenericAllocationHandle retained = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuMemRelease, block.handle));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemRelease, block.handle));
    assert_int_equal(usage_of(0).physical_bytes, 2 * GRANULE); /* still mapped */
    assert_bytes(block.address, block.bytes, TMS_SIM_POISON);
    ASSERT_CUDA(CALL(cuMemRetainAllocationHandle, &retained, (void *)(uintptr_t)(block.address + GRANULE)));
    assert_int_equal(retained, block.handle);
    ASSERT_CUDA(CALL(cuMemUnmap, block.address, block.bytes));
    assert_int_equal(usage_of(0).physical_bytes, 2 * GRANULE); /* somebody else holds it */
    assert_int_equal(usage_of(0).handles, 1);
    ASSERT_CUDA(CALL(cuMemRelease, retained));
    assert_int_equal(usage_of(0).physical_bytes, 0);
    assert_int_equal(usage_of(0).handles, 0);
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, block.bytes));
}

static void bytes_go_with_the_physical_memory(void **state) {
    block_t block = make_block(0, GRANULE);
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    (void)state;
    memset((void *)(uintptr_t)block.address, 3, GRANULE);
    ASSERT_CUDA(CALL(cuMemUnmap, block.address, GRANULE));
    assert_false(is_readable(block.address));
    ASSERT_CUDA(CALL(cuMemMap, block.address, GRANULE, 0, block.handle, 0)); /* kept handle: kept bytes */
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    assert_bytes(block.address, GRANULE, 3);
    unmap_block(&block);
    ASSERT_CUDA(CALL(cuMemCreate, &block.handle, GRANULE, &properties, 0)); /* new handle: poison */
    ASSERT_CUDA(CALL(cuMemMap, block.address, GRANULE, 0, block.handle, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    assert_bytes(block.address, GRANULE, TMS_SIM_POISON);
    drop_block(&block);
}

static void large_memory_is_poisoned_at_its_ends(void **state) {
    (void)state;
    CALL(set_poison_limit, 4 * MIB);
    block_t small = make_block(0, 4 * MIB), large = make_block(0, 8 * MIB);
    assert_bytes(small.address, small.bytes, TMS_SIM_POISON);
    assert_bytes(large.address, MIB, TMS_SIM_POISON);
    assert_bytes(large.address + MIB, large.bytes - 2 * MIB, 0);
    assert_bytes(large.address + large.bytes - MIB, MIB, TMS_SIM_POISON);
    CALL(set_poison_limit, 64 * MIB);
    drop_block(&small);
    drop_block(&large);
}

static unsigned count_files(void) {
    enum { LIMIT = 1024 };
    unsigned open_files = 0;
    for (int file = 0; file < LIMIT; file++) open_files += fcntl(file, F_GETFD) >= 0;
    return open_files;
}

static void handles_cost_no_file_each(void **state) {
    enum { HANDLES = 24 };
    CUmemGenericAllocationHandle handle[HANDLES];
    CUmemAllocationProp properties = pinned_on(0);
    (void)state;
    ASSERT_CUDA(CALL(cuMemCreate, &handle[0], GRANULE, &properties, 0));
    unsigned before = count_files();
    for (int i = 1; i < HANDLES; i++) ASSERT_CUDA(CALL(cuMemCreate, &handle[i], GRANULE, &properties, 0));
    assert_int_equal(count_files(), before);
    for (int i = 0; i < HANDLES; i++) ASSERT_CUDA(CALL(cuMemRelease, handle[i]));
}

static void allocations_of_the_driver(void **state) {
    CUdeviceptr address = 0, other = 0;
    CUmemGenericAllocationHandle handle = 0;
    uint8_t bytes[3] = {1, 2, 3}, back[3] = {0};
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAlloc_v2, &address, 0));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemAlloc_v2, &address, DEVICE_MEMORY + 1));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemAlloc_v2, &address, SIZE_MAX));
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &address, 3));
    assert_int_equal(usage_of(0).runtime_allocations, 1);
    assert_int_equal(usage_of(0).physical_bytes, GRANULE);
    assert_int_equal(usage_of(0).handles, 0);
    assert_int_equal(usage_of(0).reservations, 0);
    assert_bytes(address, 3, TMS_SIM_POISON);
    ASSERT_CUDA(CALL(cuMemcpyHtoD_v2, address, bytes, sizeof bytes));
    ASSERT_CUDA(CALL(cuMemcpyDtoH_v2, back, address, sizeof back));
    assert_memory_equal(bytes, back, sizeof bytes);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoH_v2, back, address, 4)); /* beyond its end */
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &other, 3));
    ASSERT_CUDA(CALL(cuMemcpyDtoD_v2, other, address, 3));
    assert_memory_equal((void *)(uintptr_t)other, bytes, sizeof bytes);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address, GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemRetainAllocationHandle, &handle, (void *)(uintptr_t)address));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemFree_v2, address + 1));
    ASSERT_CUDA(CALL(cuMemFree_v2, address));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemFree_v2, address));
    ASSERT_CUDA(CALL(cuMemFree_v2, other));
}

static void host_memory_is_tracked(void **state) {
    static uint8_t own[8192];
    void *host = NULL;
    unsigned type = 0;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemHostAlloc, &host, 0, 0));
    ASSERT_CUDA(CALL(cuMemHostAlloc, &host, 4096, CU_MEMHOSTALLOC_PORTABLE));
    memset(host, 1, 4096);
    ASSERT_CUDA(CALL(cuMemHostRegister_v2, own, sizeof own, 0));
    assert_int_equal(usage_of(0).host_bytes, 4096 + sizeof own);
    ASSERT_RESULT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CALL(cuMemHostRegister_v2, own + 4096, 4096, 0));
    ASSERT_CUDA(CALL(cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)own + 1));
    assert_int_equal(type, CU_MEMORYTYPE_HOST);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemFreeHost, own)); /* registered, not allocated */
    ASSERT_CUDA(CALL(cuMemHostUnregister, own));
    ASSERT_RESULT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CALL(cuMemHostUnregister, own));
    ASSERT_CUDA(CALL(cuMemFreeHost, host));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemFreeHost, host));
}

static void pointers_tell_where_they_point(void **state) {
    block_t block = make_block(0, GRANULE);
    unsigned type = 0;
    int ordinal = -1;
    (void)state;
    ASSERT_CUDA(CALL(cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block.address + 5));
    assert_int_equal(type, CU_MEMORYTYPE_DEVICE);
    ASSERT_CUDA(CALL(cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, block.address));
    assert_int_equal(ordinal, 0);
    unmap_block(&block);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE,
                  CALL(cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block.address));
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, block.bytes));
}

static void export_is_not_supported(void **state) {
    block_t block = make_block(0, GRANULE);
    int file = -1;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemExportToShareableHandle, &file, block.handle,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    drop_block(&block);
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(nothing_works_before_init),
        TWO(devices_describe_themselves),
        TWO(primary_contexts_are_counted),
        ONE(destroying_a_context_frees_its_allocations),
        ONE(reservations_are_exact),
        ONE(physical_memory_is_charged),
        ONE(memory_taken_by_others_counts),
        ONE(mapping_takes_whole_handles_at_granules),
        ONE(one_handle_shows_at_two_addresses),
        ONE(access_needs_fully_mapped_ranges),
        ONE(unmapping_takes_whole_mappings),
        ONE(memory_is_free_when_unmapped_and_released),
        ONE(bytes_go_with_the_physical_memory),
        ONE(large_memory_is_poisoned_at_its_ends),
        ONE(handles_cost_no_file_each),
        ONE(allocations_of_the_driver),
        ONE(host_memory_is_tracked),
        ONE(pointers_tell_where_they_point),
        ONE(export_is_not_supported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
