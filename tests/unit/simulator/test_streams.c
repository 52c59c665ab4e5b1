/* Guards the simulated GPU's work: streams, events, and work in flight when memory is released. Nothing here depends on
 * time: gates hold work back until the test opens them. */
#include "support/streams_fixture.h"

static void work_waits_for_its_gate(void **state) {
    block_t block = make_block(0, 2 * GRANULE);
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    (void)state;
    assert_int_equal(usage_of(0).streams, 1);
    ASSERT_CUDA(CALL(launch_add, stream, block.address, block.bytes, 1, GATE));
    ASSERT_CUDA(CALL(launch_add, stream, block.address, block.bytes, 2, NO_GATE));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cuStreamQuery, stream));
    assert_bytes(block.address, block.bytes, TMS_SIM_POISON);
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    ASSERT_CUDA(CALL(cuStreamQuery, stream));
    assert_bytes(block.address, block.bytes, TMS_SIM_POISON + 3);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cuStreamSynchronize, stream));
    drop_block(&block);
}

static void synchronizing_waits_for_all_streams(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream first = make_stream(CU_STREAM_NON_BLOCKING), second = make_stream(CU_STREAM_NON_BLOCKING);
    waiter_t waiter = {.address = block.address};
    (void)state;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &waiter.context));
    ASSERT_CUDA(CALL(launch_add, first, block.address, GRANULE / 2, 1, GATE));
    ASSERT_CUDA(CALL(launch_add, second, block.address + GRANULE / 2, GRANULE / 2, 1, OTHER_GATE));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, second)); /* its work continues, and counts */
    assert_int_equal(pthread_create(&waiter.thread, NULL, synchronize, &waiter), 0);
    CALL(wait_until_synchronizing);
    CALL(open_gate, OTHER_GATE);
    CALL(wait_until_synchronizing); /* still: the other gate is closed */
    CALL(open_gate, GATE);
    assert_int_equal(pthread_join(waiter.thread, NULL), 0);
    ASSERT_CUDA(waiter.result);
    assert_int_equal(waiter.seen, TMS_SIM_POISON + 1);
    assert_bytes(block.address, GRANULE, TMS_SIM_POISON + 1);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, first));
    drop_block(&block);
}

static void unmapping_under_work_is_a_fault(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    size_t available = 0, total = 0;
    CUcontext context = NULL;
    void *host = NULL;
    (void)state;
    ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE, 1, GATE));
    unmap_block(&block);
    CALL(open_gate, GATE);
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuStreamSynchronize, stream));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuCtxSynchronize));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuMemGetInfo_v2, &available, &total));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuMemHostAlloc, &host, 1, 0));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(launch_add, stream, block.address, 1, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, GRANULE)); /* needs no context */
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuDevicePrimaryCtxRetain, &context, 0)); /* not retained again */
}

static void work_on_fresh_memory_at_an_old_address_is_fine(void **state) {
    block_t block = make_block(0, GRANULE);
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    (void)state;
    ASSERT_CUDA(CALL(launch_add, NULL, block.address, GRANULE, 1, GATE));
    unmap_block(&block);
    ASSERT_CUDA(CALL(cuMemCreate, &block.handle, GRANULE, &properties, 0));
    ASSERT_CUDA(CALL(cuMemMap, block.address, GRANULE, 0, block.handle, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_bytes(block.address, GRANULE, TMS_SIM_POISON + 1);
    drop_block(&block);
}

static void a_copy_in_flight_faults_too(void **state) {
    enum { SLOW = 1 << 20 };
    block_t block = make_block(0, 8 * MIB);
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    void *host = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuMemHostAlloc, &host, block.bytes, 0));
    CALL(set_bandwidth, SLOW); /* eight seconds long, if it were not cut short */
    ASSERT_CUDA(CALL(cuMemcpyDtoHAsync_v2, host, block.address, block.bytes, stream));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cuStreamQuery, stream));
    unmap_block(&block); /* does not wait for it */
    CALL(set_bandwidth, 0);
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuStreamSynchronize, stream));
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, block.bytes));
    assert_int_equal(usage_of(0).host_bytes, 8 * MIB);
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    assert_int_equal(usage_of(0).host_bytes, 0); /* it is destroyed with the context */
    ASSERT_RESULT(CUDA_ERROR_CONTEXT_IS_DESTROYED, CALL(cuMemFreeHost, host));
}

static void asynchronous_copies_move_bytes(void **state) {
    block_t block = make_block(0, 4 * MIB);
    CUstream stream = make_stream(0);
    uint8_t *host = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuMemHostAlloc, (void **)&host, 2 * block.bytes, 0));
    for (uint64_t i = 0; i < block.bytes; i++) host[i] = (uint8_t)(i * 7 + i / 4096);
    ASSERT_CUDA(CALL(cuMemcpyHtoDAsync_v2, block.address, host, block.bytes, stream));
    ASSERT_CUDA(CALL(cuMemcpyDtoHAsync_v2, host + block.bytes, block.address, block.bytes, stream));
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    assert_memory_equal(host, host + block.bytes, block.bytes);
    ASSERT_CUDA(CALL(cuMemcpyDtoDAsync_v2, block.address, block.address + 2 * MIB, MIB, stream));
    ASSERT_CUDA(CALL(cuMemsetD8Async, block.address + MIB, 9, MIB, stream));
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    assert_memory_equal((void *)(uintptr_t)block.address, host + 2 * MIB, MIB);
    assert_bytes(block.address + MIB, MIB, 9);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_CUDA(CALL(cuMemFreeHost, host));
    drop_block(&block);
}

static void copies_are_checked_when_issued(void **state) {
    block_t block = make_block(0, GRANULE);
    uint8_t host[16] = {0};
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoH_v2, host, block.address + GRANULE - 8, 16));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoH_v2, NULL, block.address, 16));
    ASSERT_CUDA(CALL(cuMemcpyDtoH_v2, (void *)(uintptr_t)block.address, block.address + 16, 16)); /* one address space */
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyHtoD_v2, (uintptr_t)host, host, 16));
    ASSERT_CUDA(CALL(cuMemcpyDtoH_v2, host, 0, 0)); /* nothing to do */
    unmap_block(&block);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoH_v2, host, block.address, 16));
    ASSERT_CUDA(CALL(cuCtxSynchronize)); /* refused, not a fault */
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, GRANULE));
}

static void the_legacy_stream_orders_blocking_streams(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream blocking = make_stream(CU_STREAM_DEFAULT), free_stream = make_stream(CU_STREAM_NON_BLOCKING);
    (void)state;
    ASSERT_CUDA(CALL(launch_add, blocking, block.address, 1, 1, GATE));
    ASSERT_CUDA(CALL(cuMemsetD8Async, block.address, 100, 1, NULL));       /* after the add */
    ASSERT_CUDA(CALL(launch_add, blocking, block.address, 1, 5, NO_GATE)); /* after the fill */
    ASSERT_CUDA(CALL(launch_add, free_stream, block.address + 1, 1, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuStreamSynchronize, free_stream)); /* waits for neither */
    assert_bytes(block.address, 1, TMS_SIM_POISON);
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuStreamSynchronize, blocking));
    assert_bytes(block.address, 1, 105);
    ASSERT_CUDA(CALL(cuStreamSynchronize, NULL));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cuStreamDestroy_v2, NULL));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, blocking));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, free_stream));
    drop_block(&block);
}

/* The first stream's work is long and ends at the byte that the second one sets: without the order, the second finishes
 * first. */
static void events_order_streams(void **state) {
    block_t block = make_block(0, 32 * MIB);
    CUdeviceptr last = block.address + block.bytes - 1;
    CUstream first = make_stream(CU_STREAM_NON_BLOCKING), second = make_stream(CU_STREAM_NON_BLOCKING);
    CUevent event = NULL;
    (void)state;
    memset((void *)(uintptr_t)block.address, TMS_SIM_POISON, block.bytes); /* more than a fresh block is filled with */
    ASSERT_CUDA(CALL(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING));
    ASSERT_CUDA(CALL(cuEventQuery, event));
    ASSERT_CUDA(CALL(launch_add, first, block.address, block.bytes, 1, GATE));
    ASSERT_CUDA(CALL(cuEventRecord, event, first));
    ASSERT_CUDA(CALL(cuStreamWaitEvent, second, event, 0));
    ASSERT_CUDA(CALL(cuMemsetD8Async, last, 50, 1, second));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cuEventQuery, event));
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuEventSynchronize, event));
    ASSERT_CUDA(CALL(cuStreamSynchronize, second));
    assert_bytes(block.address, block.bytes - 1, TMS_SIM_POISON + 1);
    assert_bytes(last, 1, 50);
    ASSERT_CUDA(CALL(cuEventDestroy_v2, event));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cuEventQuery, event));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, first));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, second));
    drop_block(&block);
}

static void destroying_a_context_drops_its_work(void **state) {
    block_t block = make_block(0, GRANULE);
    (void)state;
    ASSERT_CUDA(CALL(launch_add, NULL, block.address, GRANULE, 1, GATE));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    retain_primary(0);
    ASSERT_CUDA(CALL(cuCtxSynchronize)); /* the new owner does not wait for the old one's work */
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuMemsetD8_v2, block.address, 7, 1));
    assert_bytes(block.address, 1, 7);
    assert_bytes(block.address + 1, GRANULE - 1, TMS_SIM_POISON);
    drop_block(&block);
}

static void *free_host(void *argument) {
    waiter_t *waiter = argument;
    waiter->result = CALL(cuCtxPushCurrent_v2, waiter->context);
    if (waiter->result == CUDA_SUCCESS) waiter->result = CALL(cuMemFreeHost, (void *)(uintptr_t)waiter->address);
    return NULL;
}

static void freeing_host_memory_waits_for_its_copies(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    waiter_t waiter = {0};
    void *host = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &waiter.context));
    ASSERT_CUDA(CALL(cuMemHostAlloc, &host, GRANULE, 0));
    memset(host, 4, GRANULE);
    ASSERT_CUDA(CALL(launch_add, stream, block.address, 1, 1, GATE));
    ASSERT_CUDA(CALL(cuMemcpyHtoDAsync_v2, block.address, host, GRANULE, stream));
    waiter.address = (uintptr_t)host;
    assert_int_equal(pthread_create(&waiter.thread, NULL, free_host, &waiter), 0);
    CALL(wait_until_synchronizing);
    assert_int_equal(usage_of(0).host_bytes, GRANULE);
    CALL(open_gate, GATE);
    assert_int_equal(pthread_join(waiter.thread, NULL), 0);
    ASSERT_CUDA(waiter.result);
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    assert_bytes(block.address, GRANULE, 4);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(work_waits_for_its_gate),
        ONE(synchronizing_waits_for_all_streams),
        ONE(unmapping_under_work_is_a_fault),
        ONE(work_on_fresh_memory_at_an_old_address_is_fine),
        ONE(a_copy_in_flight_faults_too),
        ONE(asynchronous_copies_move_bytes),
        ONE(copies_are_checked_when_issued),
        ONE(the_legacy_stream_orders_blocking_streams),
        ONE(events_order_streams),
        ONE(destroying_a_context_drops_its_work),
        ONE(freeing_host_memory_waits_for_its_copies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
