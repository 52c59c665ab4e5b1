/* Guards the simulated GPU's runtime: streams, events and the program's functions in their order. */
#include "support/runtime_streams_fixture.h"

static void streams_report_their_properties(void **state) {
    CUstream stream = NULL;
    unsigned long long id = 0, legacy = 0;
    int value = 7;
    unsigned flags = 7;
    (void)state;
    ASSERT_CUDA(CALL(cudaSetDevice, 1));
    ASSERT_CUDA(CALL(cudaStreamCreateWithPriority, &stream, NON_BLOCKING, -9));
    ASSERT_CUDA(CALL(cudaStreamGetPriority, stream, &value));
    assert_int_equal(value, -5);
    ASSERT_CUDA(CALL(cudaStreamGetFlags, stream, &flags));
    assert_int_equal(flags, NON_BLOCKING);
    ASSERT_CUDA(CALL(cudaSetDevice, 0));
    ASSERT_CUDA(CALL(cudaStreamGetDevice, stream, &value));
    assert_int_equal(value, 1);
    ASSERT_CUDA(CALL(cudaStreamGetId, stream, &id));
    ASSERT_CUDA(CALL(cudaStreamGetId, NULL, &legacy));
    assert_int_not_equal(id, legacy);
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cudaStreamGetPriority, stream, &value));
}

static void *use_own_stream(void *argument) {
    unsigned long long *id = argument;
    CALL(cudaSetDevice, 0);
    CALL(cudaStreamGetId, CU_STREAM_PER_THREAD, id);
    return NULL;
}

static void each_thread_has_a_default_stream(void **state) {
    unsigned long long own = 0, again = 0, other = 0, legacy = 0;
    uint8_t *memory = allocate(1);
    pthread_t thread;
    (void)state;
    ASSERT_CUDA(CALL(cudaStreamGetId, CU_STREAM_PER_THREAD, &own));
    ASSERT_CUDA(CALL(cudaStreamGetId, CU_STREAM_PER_THREAD, &again));
    ASSERT_CUDA(CALL(cudaStreamGetId, NULL, &legacy));
    assert_int_equal(pthread_create(&thread, NULL, use_own_stream, &other), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(own, again);
    assert_int_not_equal(own, legacy);
    assert_int_not_equal(own, other);
    assert_int_not_equal(other, 0);
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory, 3, 1, CU_STREAM_PER_THREAD));
    ASSERT_CUDA(CALL(cudaStreamSynchronize, CU_STREAM_PER_THREAD));
    assert_int_equal(*memory, 3);
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cudaStreamDestroy, CU_STREAM_PER_THREAD));
    assert_int_equal(usage_of(0).streams, 0);
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static void functions_are_called_in_stream_order(void **state) {
    CUstream stream = make_stream();
    uint8_t *memory = allocate(1);
    seen_t first = {.memory = memory}, second = {.memory = memory, .status = CUDA_ERROR_UNKNOWN};
    (void)state;
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory, 1, 1, stream));
    ASSERT_CUDA(CALL(launch_add, stream, (uintptr_t)memory, 1, 1, 1));
    ASSERT_CUDA(CALL(cudaLaunchHostFunc, stream, look, &first));
    ASSERT_CUDA(CALL(cudaMemsetAsync, memory, 9, 1, stream));
    ASSERT_CUDA(CALL(cudaStreamAddCallback, stream, look_as_callback, &second, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cudaStreamQuery, stream));
    CALL(open_gate, 1);
    ASSERT_CUDA(CALL(cudaStreamSynchronize, stream));
    assert_int_equal(first.byte, 2);
    assert_int_equal(second.byte, 9);
    assert_int_equal(first.calls + second.calls, 2);
    assert_int_equal(first.result, CUDA_ERROR_NOT_PERMITTED); /* it may not call the driver */
    assert_int_equal(second.status, CUDA_SUCCESS);
    assert_ptr_equal(second.stream, stream);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaLaunchHostFunc, stream, NULL, NULL));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static void events_measure_time(void **state) {
    enum { RATE = 100 << 20, EXPECTED_MILLISECONDS = 20 };
    CUstream stream = make_stream();
    CUevent start = make_event(0), end = make_event(BLOCKING_SYNC), silent = make_event(DISABLE_TIMING);
    uint8_t *memory = allocate(GRANULE), *other = allocate(GRANULE);
    float milliseconds = -1;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaEventCreateWithFlags, &silent, INTERPROCESS));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cudaEventElapsedTime, &milliseconds, start, end)); /* not recorded */
    ASSERT_CUDA(CALL(cudaEventRecord, start, stream));
    ASSERT_CUDA(CALL(cudaEventQuery, start)); /* nothing is before it */
    CALL(set_bandwidth, RATE);
    ASSERT_CUDA(CALL(launch_add, stream, (uintptr_t)memory, 1, 1, 1));
    ASSERT_CUDA(CALL(cudaMemcpyAsync, other, memory, GRANULE, DEVICE_TO_DEVICE, stream));
    ASSERT_CUDA(CALL(cudaEventRecord, end, stream));
    ASSERT_CUDA(CALL(cudaEventRecord, silent, stream));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cudaEventQuery, end));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cudaEventElapsedTime, &milliseconds, start, end));
    CALL(open_gate, 1);
    ASSERT_CUDA(CALL(cudaEventSynchronize, end));
    ASSERT_CUDA(CALL(cudaEventElapsedTime, &milliseconds, start, end));
    assert_true(milliseconds >= EXPECTED_MILLISECONDS); /* the bandwidth allows no less: that much is certain */
    ASSERT_CUDA(CALL(cudaEventElapsedTime, &milliseconds, end, start));
    assert_true(milliseconds <= -EXPECTED_MILLISECONDS);
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cudaEventElapsedTime, &milliseconds, start, silent));
    ASSERT_CUDA(CALL(cudaEventDestroy, start));
    ASSERT_CUDA(CALL(cudaEventDestroy, end));
    ASSERT_CUDA(CALL(cudaEventDestroy, silent));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaFree, memory));
    ASSERT_CUDA(CALL(cudaFree, other));
}

static void no_time_lies_between_events_of_two_devices(void **state) {
    CUevent start = make_event(0), end = NULL;
    float milliseconds = -1;
    (void)state;
    ASSERT_CUDA(CALL(cudaEventRecord, start, NULL));
    ASSERT_CUDA(CALL(cudaSetDevice, 1));
    end = make_event(0);
    ASSERT_CUDA(CALL(cudaEventRecord, end, NULL));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cudaEventElapsedTime, &milliseconds, start, end));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cudaEventElapsedTime, &milliseconds, end, start));
    ASSERT_CUDA(CALL(cudaEventSynchronize, end));
    ASSERT_CUDA(CALL(cudaEventElapsedTime, &milliseconds, end, end));
    ASSERT_CUDA(CALL(cudaEventDestroy, start));
    ASSERT_CUDA(CALL(cudaEventDestroy, end));
}

/* An event may be destroyed while its record is still queued. */
static void a_queued_record_outlives_its_event(void **state) {
    CUstream stream = make_stream();
    CUevent event = make_event(0);
    uint8_t *memory = allocate(1);
    (void)state;
    ASSERT_CUDA(CALL(launch_add, stream, (uintptr_t)memory, 1, 1, 1));
    ASSERT_CUDA(CALL(cudaEventRecord, event, stream));
    ASSERT_CUDA(CALL(cudaEventDestroy, event));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cudaEventQuery, event));
    CALL(open_gate, 1);
    ASSERT_CUDA(CALL(cudaStreamSynchronize, stream));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TWO(streams_report_their_properties),
        ONE(each_thread_has_a_default_stream),
        ONE(functions_are_called_in_stream_order),
        ONE(events_measure_time),
        TWO(no_time_lies_between_events_of_two_devices),
        ONE(a_queued_record_outlives_its_event),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
