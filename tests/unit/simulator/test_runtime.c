/* Guards the simulated GPU's runtime: device properties, host memory, copies of rows and between devices, pointers, and the
 * errors that a thread remembers. */
#include <dlfcn.h>
#include <string.h>

#include "simulated_cuda.h"

enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3, COPY_DEFAULT = 4, INVALID_PITCH = 12 };
enum { INVALID_DIRECTION = 21, INVALID_FUNCTION = 98 };

static void *allocate(size_t bytes) {
    void *memory = NULL;
    ASSERT_CUDA(CALL(cudaMalloc, &memory, bytes));
    return memory;
}

static void properties_have_the_layout_of_their_version(void **state) {
    sim_properties_12_t old;
    sim_properties_13_t new;
    CUuuid uuid;
    (void)state;
    memset(&old, 0xff, sizeof old);
    ASSERT_CUDA(CALL(cudaGetDeviceProperties_v2, &old, 1));
    ASSERT_CUDA(CALL(cudaGetDeviceProperties, &new, 1));
    assert_string_equal(old.name, "Simulated GPU");
    assert_string_equal(new.name, "Simulated GPU");
    assert_int_equal(old.total_memory, DEVICE_MEMORY);
    assert_int_equal(new.total_memory, DEVICE_MEMORY);
    assert_int_equal(new.major * 10 + new.minor, 90);
    assert_int_equal(old.multiprocessors, new.multiprocessors);
    assert_int_equal(new.threads_per_multiprocessor, 2048);
    assert_int_equal(old.pci_bus, new.pci_bus);
    assert_int_equal(old.grid_dimensions[1], 65535);
    assert_int_equal(old.ipc_events, 1);
    assert_int_equal(old.reserved[62], 0);
    /* Where torch built for CUDA 12 and 13 reads the warp size: offsets from NVIDIA's header. */
    assert_int_equal(offsetof(sim_properties_12_t, warp_size), offsetof(sim_properties_13_t, warp_size));
    assert_int_equal(offsetof(sim_properties_13_t, major), 360);
    ASSERT_CUDA(CALL(cuDeviceGetUuid_v2, &uuid, 1));
    assert_memory_equal(uuid.bytes, new.uuid, sizeof uuid.bytes);
    ASSERT_CUDA(CALL(cudaGetDeviceProperties, &new, 0));
    assert_memory_not_equal(uuid.bytes, new.uuid, sizeof uuid.bytes);
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cudaGetDeviceProperties, &new, 2));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaGetDeviceProperties_v2, NULL, 0));
}

static void devices_answer_questions(void **state) {
    int value = 0, least = -1, greatest = 0;
    char text[13];
    (void)state;
    ASSERT_CUDA(CALL(cudaDriverGetVersion, &value));
    assert_int_equal(value, TMS_SIM_DRIVER_VERSION);
    ASSERT_CUDA(CALL(cudaRuntimeGetVersion, &value));
    assert_int_equal(value, TMS_SIM_DRIVER_VERSION);
    ASSERT_CUDA(CALL(cudaDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    assert_int_equal(value, 9);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaDeviceGetAttribute, &value, (CUdevice_attribute)0, 0));
    ASSERT_CUDA(CALL(cudaDeviceGetPCIBusId, text, sizeof text, 1));
    assert_string_equal(text, "0000:11:00.0");
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaDeviceGetPCIBusId, text, sizeof text - 1, 1));
    ASSERT_CUDA(CALL(cudaDeviceGetStreamPriorityRange, &least, &greatest));
    assert_int_equal(least, 0);
    assert_int_equal(greatest, -5);
}

static void driver_functions_are_found_by_name(void **state) {
    void *function = NULL, *by_driver = NULL;
    int status = -1;
    (void)state;
    ASSERT_CUDA(CALL(cudaGetDriverEntryPoint, "cuMemCreate", &function, 0, &status));
    assert_int_equal(status, 0);
    ASSERT_CUDA(CALL(cuGetProcAddress_v2, "cuMemCreate", &by_driver, 13000, 0, NULL));
    assert_ptr_equal(function, by_driver);
    ASSERT_CUDA(CALL(cudaGetDriverEntryPointByVersion, "cuNothing", &function, 12030, 0, &status));
    assert_int_equal(status, 1);
    assert_null(function);
    ASSERT_RESULT(CUDA_ERROR_NOT_FOUND, CALL(cudaGetDriverEntryPoint, "cuNothing", &function, 0, NULL));
}

static void kernels_have_attributes(void **state) {
    static const char registered = 0, unknown = 0;
    sim_function_attributes_t attributes;
    int blocks = 0;
    void **(*begin)(void *) = NULL;
    void (*end)(void **) = NULL;
    void (*add)(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) = NULL;
    (void)state;
    *(void **)&begin = dlsym(RTLD_DEFAULT, "__cudaRegisterFatBinary");
    *(void **)&end = dlsym(RTLD_DEFAULT, "__cudaUnregisterFatBinary");
    *(void **)&add = dlsym(RTLD_DEFAULT, "__cudaRegisterFunction");
    void **module = begin(NULL);
    add(module, &registered, NULL, "_Z1kv", 0, NULL, NULL, NULL, NULL, NULL);
    ASSERT_CUDA(CALL(cudaFuncGetAttributes, &attributes, &registered));
    assert_int_equal(attributes.max_threads_per_block, 1024);
    ASSERT_CUDA(CALL(cudaFuncSetAttribute, &registered, 8, 1));
    ASSERT_CUDA(CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, &registered, 512, 0));
    assert_int_equal(blocks, 4);
    ASSERT_CUDA(CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, &blocks, &registered, 512, 100 << 10, 0));
    assert_int_equal(blocks, 2);
    ASSERT_RESULT(INVALID_FUNCTION, CALL(cudaFuncGetAttributes, &attributes, &unknown));
    end(module);
    ASSERT_RESULT(INVALID_FUNCTION, CALL(cudaFuncSetAttribute, &registered, 8, 1));
}

static void host_memory_is_allocated_and_registered(void **state) {
    static char ordinary[4096];
    void *host = &host, *device = NULL;
    unsigned flags = 0;
    sim_pointer_attributes_t attributes;
    (void)state;
    ASSERT_CUDA(CALL(cudaHostAlloc, &host, 0, 0));
    assert_null(host);
    ASSERT_CUDA(CALL(cudaHostAlloc, &host, 100, 0));
    assert_int_equal(usage_of(0).host_bytes, 100);
    ASSERT_CUDA(CALL(cudaHostGetDevicePointer, &device, host, 0));
    assert_ptr_equal(device, host);
    ASSERT_CUDA(CALL(cudaHostGetFlags, &flags, (uint8_t *)host + 1));
    assert_int_equal(flags, CU_MEMHOSTALLOC_DEVICEMAP);
    ASSERT_CUDA(CALL(cudaPointerGetAttributes, &attributes, host));
    assert_int_equal(attributes.type, 1);
    ASSERT_CUDA(CALL(cudaFreeHost, host));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaHostGetDevicePointer, &device, ordinary, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaHostGetFlags, &flags, ordinary));
    ASSERT_CUDA(CALL(cudaHostRegister, ordinary, sizeof ordinary, CU_MEMHOSTREGISTER_PORTABLE));
    ASSERT_CUDA(CALL(cudaHostGetFlags, &flags, ordinary));
    assert_int_equal(flags, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    ASSERT_CUDA(CALL(cudaHostGetDevicePointer, &device, ordinary + 1, 0));
    ASSERT_CUDA(CALL(cudaHostUnregister, ordinary));
    ASSERT_RESULT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CALL(cudaHostUnregister, ordinary));
}

/* A caller built for CUDA 12 has room for only these 24 bytes. */
static void pointer_attributes_fit_the_older_structure(void **state) {
    struct {
        sim_pointer_attributes_t attributes;
        uint64_t behind;
    } caller = {.behind = 42};
    void *memory = allocate(GRANULE);
    (void)state;
    ASSERT_CUDA(CALL(cudaPointerGetAttributes, &caller.attributes, (char *)memory + 5));
    assert_int_equal(caller.attributes.type, 2);
    assert_int_equal(caller.attributes.device, 0);
    assert_ptr_equal(caller.attributes.device_pointer, (char *)memory + 5);
    assert_null(caller.attributes.host_pointer);
    assert_int_equal(caller.behind, 42);
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static void rows_are_copied_and_filled(void **state) {
    enum { ROWS = 3, WIDTH = 4, PITCH = 7 };
    uint8_t host[ROWS * WIDTH], back[ROWS * WIDTH] = {0};
    uint8_t *memory = allocate(GRANULE), *end = memory + GRANULE;
    CUstream stream = NULL;
    (void)state;
    for (size_t i = 0; i < sizeof host; i++) host[i] = (uint8_t)(i + 1);
    ASSERT_CUDA(CALL(cudaStreamCreate, &stream));
    ASSERT_CUDA(CALL(cudaMemset2DAsync, memory, PITCH, 9, WIDTH + 1, ROWS, stream));
    ASSERT_CUDA(CALL(cudaMemcpy2DAsync, memory, PITCH, host, WIDTH, WIDTH, ROWS, HOST_TO_DEVICE, stream));
    ASSERT_CUDA(CALL(cudaMemcpy2D, back, WIDTH, memory, PITCH, WIDTH, ROWS, COPY_DEFAULT));
    assert_memory_equal(back, host, sizeof host);
    for (int row = 0; row < ROWS; row++) {
        assert_int_equal(memory[row * PITCH + WIDTH], 9);                  /* of the fill, and not overwritten */
        assert_int_equal(memory[row * PITCH + WIDTH + 1], TMS_SIM_POISON); /* between the rows */
    }
    ASSERT_RESULT(INVALID_PITCH, CALL(cudaMemcpy2D, memory, WIDTH - 1, host, WIDTH, WIDTH, ROWS, HOST_TO_DEVICE));
    ASSERT_RESULT(INVALID_DIRECTION, CALL(cudaMemcpy2D, memory, PITCH, host, WIDTH, WIDTH, ROWS, 5));
    /* The last row would end behind the memory; with one row less it fits. */
    uint8_t *last = end - 2 * PITCH - WIDTH + 1;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaMemset2D, last, PITCH, 1, WIDTH, ROWS));
    ASSERT_CUDA(CALL(cudaMemset2D, last, PITCH, 1, WIDTH, ROWS - 1));
    ASSERT_CUDA(CALL(cudaMemcpy2D, memory, 2, host, 2, 2, ROWS, HOST_TO_DEVICE)); /* one piece */
    assert_memory_equal(memory, host, 6);
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static void words_are_written(void **state) {
    uint8_t *memory = allocate(GRANULE);
    const uint8_t expected[] = {4, 3, 2, 1, 4, 3, 2, 1, 8, 7, 6, 5, TMS_SIM_POISON};
    (void)state;
    ASSERT_CUDA(CALL(cuMemsetD32Async, (uintptr_t)memory, 0x01020304, 2, NULL));
    ASSERT_CUDA(CALL(cuStreamWriteValue32_v2, NULL, (uintptr_t)memory + 8, 0x05060708, 0));
    ASSERT_CUDA(CALL(cudaDeviceSynchronize));
    assert_memory_equal(memory, expected, sizeof expected);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemsetD32Async, (uintptr_t)memory + 2, 0, 1, NULL));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static void devices_copy_to_one_another(void **state) {
    void *here = allocate(16), *there = NULL;
    CUdeviceptr start = 0;
    size_t bytes = 0;
    (void)state;
    ASSERT_CUDA(CALL(cudaSetDevice, 1));
    there = allocate(16);
    ASSERT_CUDA(CALL(cudaMemset, there, 6, 16));
    ASSERT_CUDA(CALL(cudaMemcpyPeerAsync, here, 0, there, 1, 16, NULL));
    ASSERT_CUDA(CALL(cudaDeviceSynchronize));
    assert_bytes((uintptr_t)here, 16, 6);
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cudaMemcpyPeer, here, 2, there, 1, 16));
    ASSERT_CUDA(CALL(cuMemGetAddressRange_v2, &start, &bytes, (uintptr_t)here + 7));
    assert_int_equal(start, (uintptr_t)here);
    assert_int_equal(bytes, 16);
    ASSERT_RESULT(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, CALL(cudaDeviceDisablePeerAccess, 0));
    ASSERT_CUDA(CALL(cudaDeviceEnablePeerAccess, 0, 0));
    ASSERT_CUDA(CALL(cudaDeviceDisablePeerAccess, 0));
    ASSERT_CUDA(CALL(cudaFree, here));
    ASSERT_CUDA(CALL(cudaFree, there));
}

static void a_thread_remembers_its_last_error(void **state) {
    void *memory = NULL;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cudaMalloc, &memory, DEVICE_MEMORY + 1));
    ASSERT_CUDA(CALL(cudaDeviceSynchronize));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cudaPeekAtLastError));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cudaGetLastError));
    ASSERT_CUDA(CALL(cudaGetLastError));
}

static void a_sticky_error_outlives_the_context(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cudaStreamCreate, &stream));
    ASSERT_CUDA(CALL(launch_add, stream, block.address, 1, 1, 1));
    ASSERT_CUDA(CALL(cudaMemsetAsync, (void *)(uintptr_t)block.address, 1, GRANULE, stream));
    drop_block(&block); /* without waiting */
    CALL(open_gate, 1);
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cudaStreamSynchronize, stream));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cudaGetLastError));
    ASSERT_CUDA(CALL(cudaGetLastError)); /* the thread's is forgotten, the context's is not */
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cudaStreamCreate, &stream));
    ASSERT_CUDA(CALL(cudaDeviceReset));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cudaGetLastError));
    ASSERT_RESULT(CUDA_ERROR_DEVICE_UNAVAILABLE, CALL(cudaDeviceSynchronize));
    ASSERT_RESULT(CUDA_ERROR_DEVICE_UNAVAILABLE, CALL(cudaGetLastError));
}

static void functions_that_cannot_be_simulated_say_so(void **state) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties;
    block_t block = make_block(0, GRANULE);
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMulticastCreate, &handle, NULL));
    ASSERT_CUDA(CALL(cuMemGetAllocationPropertiesFromHandle, &properties, block.handle));
    assert_int_equal(properties.location.id, 0);
    drop_block(&block);
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TWO(properties_have_the_layout_of_their_version),
        TWO(devices_answer_questions),
        ONE(driver_functions_are_found_by_name),
        ONE(kernels_have_attributes),
        ONE(host_memory_is_allocated_and_registered),
        ONE(pointer_attributes_fit_the_older_structure),
        ONE(rows_are_copied_and_filled),
        ONE(words_are_written),
        TWO(devices_copy_to_one_another),
        ONE(a_thread_remembers_its_last_error),
        ONE(a_sticky_error_outlives_the_context),
        ONE(functions_that_cannot_be_simulated_say_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
