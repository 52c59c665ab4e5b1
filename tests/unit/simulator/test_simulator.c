/* Guards the simulated GPU's devices and contexts, and the memory of cuMemAlloc and the host. */
#include <string.h>
#include <sys/mman.h>

#include "simulated_cuda.h"

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
    host = own;
    ASSERT_CUDA(CALL(cuMemHostAlloc, &host, 0, 0));
    assert_null(host);
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

static void only_usable_pages_are_registered(void **state) {
    enum { PAGE = 4096, PAGES = 4 };
    block_t block = make_block(0, GRANULE);
    CUstream stream = NULL;
    uint8_t *pages = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (void)state;
    assert_ptr_not_equal(pages, MAP_FAILED);
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    assert_int_equal(mprotect(pages + 2 * PAGE, PAGE, PROT_READ), 0);
    assert_int_equal(mprotect(pages + 3 * PAGE, PAGE, PROT_NONE), 0);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemHostRegister_v2, pages, 3 * PAGE, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemHostRegister_v2, pages, 4 * PAGE, CU_MEMHOSTREGISTER_READ_ONLY));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemHostRegister_v2, pages, PAGE, CU_MEMHOSTREGISTER_IOMEMORY));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemHostRegister_v2, (void *)(uintptr_t)block.address, PAGE, 0));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemHostRegister_v2, pages, (size_t)1 << 46, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemHostRegister_v2, pages, (size_t)1 << 63, 0));
    ASSERT_CUDA(CALL(cuMemHostRegister_v2, pages, 3 * PAGE, CU_MEMHOSTREGISTER_READ_ONLY));
    ASSERT_CUDA(CALL(cuMemHostUnregister, pages));
    ASSERT_CUDA(CALL(cuMemHostRegister_v2, pages, PAGE, 0)); /* a copy must not reach over the end of it */
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyHtoDAsync_v2, block.address, pages, 2 * PAGE, stream));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoHAsync_v2, pages + PAGE / 2, block.address, PAGE, stream));
    ASSERT_CUDA(CALL(cuMemcpyHtoDAsync_v2, block.address, pages, PAGE, stream));
    ASSERT_CUDA(CALL(cuMemcpyHtoDAsync_v2, block.address, pages + PAGE, PAGE, stream));
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    ASSERT_CUDA(CALL(cuMemHostUnregister, pages));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    assert_int_equal(munmap(pages, (size_t)PAGES * PAGE), 0);
    drop_block(&block);
}

static void pointer_attributes_describe_the_memory(void **state) {
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

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(nothing_works_before_init),
        TWO(devices_describe_themselves),
        TWO(primary_contexts_are_counted),
        ONE(destroying_a_context_frees_its_allocations),
        ONE(allocations_of_the_driver),
        ONE(host_memory_is_tracked),
        ONE(pointer_attributes_describe_the_memory),
        ONE(only_usable_pages_are_registered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
