/* Guards the control functions of the simulated GPU: injected failures, counts, the trace, forks; and the runtime's
 * functions. */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simulated_cuda.h"

enum { CHILD_FAILED = 3 };
enum { OFF, ON }; /* These are the arguments of CALL(trace). */

static void failures_are_injected_and_counted_down(void **state) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    (void)state;
    assert_int_equal(CALL(fail_after, "cuMemCreate", 1, 2, CUDA_ERROR_OUT_OF_MEMORY), 0);
    ASSERT_CUDA(CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    ASSERT_CUDA(CALL(cuMemRelease, handle)); /* another function is not affected */
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    assert_int_equal(usage_of(0).physical_bytes, 0); /* without effect */
    ASSERT_CUDA(CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    assert_int_equal(CALL(failures_fired), 2);
    ASSERT_CUDA(CALL(cuMemRelease, handle));
    CALL(fail_after, "cuMemRelease", 0, 5, CUDA_ERROR_UNKNOWN);
    CALL(fail_after, "cuMemRelease", 0, 0, 0); /* removed again */
    ASSERT_CUDA(CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    ASSERT_CUDA(CALL(cuMemRelease, handle));
}

static void names_come_with_or_without_suffix(void **state) {
    size_t available = 0, total = 0;
    (void)state;
    CALL(clear_counts);
    CALL(fail_after, "cuMemGetInfo", 0, 1, CUDA_ERROR_UNKNOWN);
    ASSERT_RESULT(CUDA_ERROR_UNKNOWN, CALL(cuMemGetInfo_v2, &available, &total));
    CALL(fail_after, "cuMemGetInfo_v2", 0, 1, CUDA_ERROR_UNKNOWN);
    ASSERT_RESULT(CUDA_ERROR_UNKNOWN, CALL(cuMemGetInfo_v2, &available, &total));
    ASSERT_CUDA(CALL(cuMemGetInfo_v2, &available, &total));
    assert_int_equal(CALL(calls, "cuMemGetInfo"), 3);
    assert_int_equal(CALL(calls, "cuMemGetInfo_v2"), 3);
    assert_int_equal(CALL(calls, "cuMemGet"), 0);
    assert_int_equal(CALL(calls, "*"), 3);
    assert_int_equal(CALL(fail_after, "cuNothing", 0, 1, CUDA_ERROR_UNKNOWN), 1);
}

static void any_driver_call_can_fail(void **state) {
    const char *name = NULL;
    void *memory = NULL;
    (void)state;
    CALL(fail_after, "*", 1, 1, CUDA_ERROR_LAUNCH_FAILED);
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuGetErrorName, CUDA_ERROR_UNKNOWN, &name)); /* uses no device */
    ASSERT_CUDA(CALL(cudaMalloc, &memory, 1));                    /* the runtime's own calls are not driver calls */
    ASSERT_RESULT(CUDA_ERROR_LAUNCH_FAILED, CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static void the_trace_is_in_order(void **state) {
    char text[256], cut[8];
    (void)state;
    block_t before = make_block(0, GRANULE);
    CALL(clear_counts);
    CALL(trace, ON);
    block_t block = make_block(0, GRANULE);
    drop_block(&block);
    CALL(trace, OFF);
    drop_block(&before);
    const char *expected = "cuMemAddressReserve\ncuMemCreate\ncuMemMap\ncuMemSetAccess\ncuMemUnmap\ncuMemRelease\n"
                           "cuMemAddressFree";
    assert_int_equal(CALL(read_trace, NULL, 0), strlen(expected));
    assert_int_equal(CALL(read_trace, text, sizeof text), strlen(expected));
    assert_string_equal(text, expected);
    assert_int_equal(CALL(read_trace, cut, sizeof cut), strlen(expected));
    assert_string_equal(cut, "cuMemAd");
    CALL(clear_counts);
    assert_int_equal(CALL(read_trace, text, sizeof text), 0);
    assert_string_equal(text, "");
}

static void deinitialized_means_no(void **state) {
    int count = 0;
    const char *name = NULL;
    void *memory = NULL;
    (void)state;
    CALL(deinitialize);
    ASSERT_RESULT(CUDA_ERROR_DEINITIALIZED, CALL(cuDeviceGetCount, &count));
    ASSERT_RESULT(CUDA_ERROR_DEINITIALIZED, CALL(cuInit, 0));
    ASSERT_RESULT(CUDA_ERROR_DEINITIALIZED, CALL(cudaMalloc, &memory, 1));
    ASSERT_CUDA(CALL(cuGetErrorName, CUDA_ERROR_DEINITIALIZED, &name));
    assert_string_equal(name, "CUDA_ERROR_DEINITIALIZED");
}

static void entry_points_are_found_by_name(void **state) {
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
    CUresult (*get_info)(size_t *, size_t *) = NULL;
    void *missing = &status;
    size_t available = 0, total = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuGetProcAddress_v2, "cuMemGetInfo", (void **)&get_info, TMS_SIM_DRIVER_VERSION, 0, &status));
    ASSERT_CUDA(get_info(&available, &total));
    assert_int_equal(total, DEVICE_MEMORY);
    ASSERT_RESULT(CUDA_ERROR_NOT_FOUND,
                  CALL(cuGetProcAddress_v2, "cuNothing", &missing, TMS_SIM_DRIVER_VERSION, 0, &status));
    assert_int_equal(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    assert_null(missing);
}

static void a_forked_child_has_no_gpu(void **state) {
    block_t block = make_block(0, GRANULE);
    CUdeviceptr address = 0;
    int status = 0;
    (void)state;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        bool refused = CALL(cuInit, 0) == CUDA_ERROR_NOT_INITIALIZED &&
                       CALL(cuMemUnmap, block.address, GRANULE) == CUDA_ERROR_NOT_INITIALIZED &&
                       CALL(cuMemAddressReserve, &address, GRANULE, 0, 0, 0) == CUDA_ERROR_NOT_INITIALIZED &&
                       CALL(cudaFree, NULL) == CUDA_ERROR_NOT_INITIALIZED && CALL(calls, "*") == 0 &&
                       CALL(calls_in_child) == 4;
        exit(refused ? 0 : CHILD_FAILED); /* destructors run here too */
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    drop_block(&block);
}

static void the_runtime_starts_by_itself(void **state) {
    void *memory = NULL;
    int device = -1, count = 0, active = 0;
    unsigned flags = 0;
    size_t available = 0, total = 0;
    (void)state;
    CALL(reset, 2, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cudaGetDeviceCount, &count));
    assert_int_equal(count, 2);
    ASSERT_CUDA(CALL(cudaGetDevice, &device));
    assert_int_equal(device, 0);
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 0, &flags, &active));
    assert_int_equal(active, 0); /* a query creates nothing */
    CALL(clear_counts);
    ASSERT_CUDA(CALL(cudaMalloc, &memory, 100));
    assert_int_equal(CALL(calls, "*"), 1); /* its inner calls are not the program's */
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 0, &flags, &active));
    assert_int_equal(active, 1);
    ASSERT_CUDA(CALL(cudaSetDevice, 1));
    ASSERT_CUDA(CALL(cudaGetDevice, &device));
    assert_int_equal(device, 1);
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cudaSetDevice, 2));
    ASSERT_CUDA(CALL(cudaMemGetInfo, &available, &total));
    assert_int_equal(available, total);
    ASSERT_CUDA(CALL(cudaFree, memory)); /* of another device than the current one */
    ASSERT_CUDA(CALL(cudaDeviceReset));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 1, &flags, &active));
    assert_int_equal(active, 0);
    ASSERT_CUDA(CALL(cudaDeviceSynchronize)); /* made again */
    CALL(reset, 0, 0);
    ASSERT_RESULT(CUDA_ERROR_NO_DEVICE, CALL(cudaMalloc, &memory, 1));
}

static void the_runtime_moves_bytes(void **state) {
    enum { TO_DEVICE = 1, TO_HOST = 2, ON_DEVICE = 3, BY_POINTERS = 4, NO_SUCH_KIND = 5, WRONG_DIRECTION = 21 };
    uint8_t bytes[64], back[64] = {0};
    uint8_t *first = NULL, *second = NULL, *host = NULL;
    CUstream stream = NULL;
    (void)state;
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(3 * i);
    ASSERT_CUDA(CALL(cudaMalloc, (void **)&first, sizeof bytes));
    ASSERT_CUDA(CALL(cudaMalloc, (void **)&second, sizeof bytes));
    ASSERT_CUDA(CALL(cudaMallocHost, (void **)&host, sizeof bytes));
    ASSERT_CUDA(CALL(cudaStreamCreate, &stream));
    ASSERT_CUDA(CALL(cudaMemcpy, first, bytes, sizeof bytes, TO_DEVICE));
    ASSERT_CUDA(CALL(cudaMemcpyAsync, second, first, sizeof bytes, ON_DEVICE, stream));
    ASSERT_CUDA(CALL(cudaMemcpyAsync, host, second, sizeof bytes, BY_POINTERS, stream));
    ASSERT_CUDA(CALL(cudaStreamSynchronize, stream));
    assert_memory_equal(host, bytes, sizeof bytes);
    ASSERT_CUDA(CALL(cudaMemset, second, 5, 32));
    ASSERT_CUDA(CALL(cudaMemsetAsync, second + 32, 6, 32, stream));
    ASSERT_CUDA(CALL(cudaDeviceSynchronize));
    assert_bytes((uintptr_t)second, 32, 5);
    assert_bytes((uintptr_t)second + 32, 32, 6);
    ASSERT_CUDA(CALL(cudaMemcpy, back, first, sizeof back, TO_HOST));
    assert_memory_equal(back, bytes, sizeof back);
    ASSERT_RESULT(WRONG_DIRECTION, CALL(cudaMemcpy, back, first, 1, NO_SUCH_KIND));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaMemcpy, back, first, 1, TO_DEVICE));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaFreeHost, host));
    ASSERT_CUDA(CALL(cudaFree, first));
    ASSERT_CUDA(CALL(cudaFree, second));
    ASSERT_CUDA(CALL(cudaFree, NULL));
}

static void the_runtime_answers_as_documented(void **state) {
    void *memory = &memory;
    sim_pointer_attributes_t attributes;
    (void)state;
    ASSERT_CUDA(CALL(cudaMalloc, &memory, 0));
    assert_null(memory);
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cudaMalloc, &memory, DEVICE_MEMORY + 1));
    assert_null(memory);
    assert_int_equal(CALL(cudaPeekAtLastError), CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(CALL(cudaGetLastError), CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(CALL(cudaGetLastError), CUDA_SUCCESS);
    assert_string_equal(CALL(cudaGetErrorName, CUDA_ERROR_OUT_OF_MEMORY), "cudaErrorMemoryAllocation");
    assert_string_equal(CALL(cudaGetErrorString, CUDA_ERROR_OUT_OF_MEMORY), "out of memory");
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaFree, &attributes));
    ASSERT_CUDA(CALL(cudaMalloc, &memory, 8));
    ASSERT_CUDA(CALL(cudaPointerGetAttributes, &attributes, memory));
    assert_int_equal(attributes.type, 2);
    assert_int_equal(attributes.device, 0);
    assert_ptr_equal(attributes.device_pointer, memory);
    ASSERT_CUDA(CALL(cudaPointerGetAttributes, &attributes, &attributes));
    assert_int_equal(attributes.type, 0);
    ASSERT_CUDA(CALL(cudaFree, memory));
    unsigned int flags = 0;
    int active = -1;
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 1, &flags, &active));
    assert_int_equal(active, 0);
    ASSERT_CUDA(CALL(cudaDeviceEnablePeerAccess, 1, 0));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxGetState, 1, &flags, &active));
    assert_int_equal(active, 1);
    ASSERT_RESULT(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CALL(cudaDeviceEnablePeerAccess, 1, 0));
    ASSERT_RESULT(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, CALL(cudaDeviceEnablePeerAccess, 0, 0));
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(failures_are_injected_and_counted_down),
        ONE(names_come_with_or_without_suffix),
        ONE(any_driver_call_can_fail),
        ONE(the_trace_is_in_order),
        ONE(deinitialized_means_no),
        ONE(entry_points_are_found_by_name),
        ONE(a_forked_child_has_no_gpu),
        ONE(the_runtime_starts_by_itself),
        ONE(the_runtime_moves_bytes),
        TWO(the_runtime_answers_as_documented),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
