/* Guards several devices of the simulated GPU: work in flight on several, lost ones, access for peers, and threads. */
#include "support/streams_fixture.h"

/* One of the four ways to unpin memory, on a thread of its own with some context. */
typedef struct giver {
    waiter_t waiter;
    CUresult (*give)(void *address);
} giver_t;

static void *give_back(void *argument) {
    giver_t *giver = argument;
    giver->waiter.result = CALL(cuCtxPushCurrent_v2, giver->waiter.context);
    if (giver->waiter.result == CUDA_SUCCESS) giver->waiter.result = giver->give((void *)(uintptr_t)giver->waiter.address);
    return NULL;
}

/* Whatever the work is, and whichever device is current: the device in whose context the memory was pinned counts. */
static void unpinning_waits_for_its_device(void **state) {
    enum { WAYS = 4 };
    static _Alignas(4096) uint8_t pages[2][4096];
    block_t block = make_block(0, GRANULE);
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    CUcontext first = NULL, second = retain_primary(1);
    CUresult (*const ways[WAYS])(void *) = {simulated()->cuMemFreeHost, simulated()->cudaFreeHost,
                                            simulated()->cuMemHostUnregister, simulated()->cudaHostUnregister};
    (void)state;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &first));
    for (int i = 0; i < WAYS; i++) {
        void *memory[2] = {pages[0], pages[1]};
        for (int device = 0; device < 2; device++) {
            ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, device ? second : first));
            if (i < 2)
                ASSERT_CUDA(CALL(cuMemHostAlloc, &memory[device], 4096, CU_MEMHOSTALLOC_PORTABLE));
            else
                ASSERT_CUDA(CALL(cuMemHostRegister_v2, memory[device], 4096, CU_MEMHOSTREGISTER_PORTABLE));
            ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, NULL));
        }
        ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE, 1, GATE + i));
        ASSERT_CUDA(ways[i](memory[1])); /* device 1 has nothing to do */
        assert_int_equal(usage_of(0).host_bytes, 4096);
        giver_t giver = {{.context = second, .address = (uintptr_t)memory[0]}, ways[i]};
        assert_int_equal(pthread_create(&giver.waiter.thread, NULL, give_back, &giver), 0);
        CALL(wait_until_synchronizing);
        assert_int_equal(usage_of(0).host_bytes, 4096);
        ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cuStreamQuery, stream));
        CALL(open_gate, GATE + i);
        assert_int_equal(pthread_join(giver.waiter.thread, NULL), 0);
        ASSERT_CUDA(giver.waiter.result);
        ASSERT_CUDA(CALL(cuStreamQuery, stream)); /* all of it was completed by then */
        assert_int_equal(usage_of(0).host_bytes, 0);
    }
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRelease_v2, 1));
    drop_block(&block);
}

static void a_lost_device_fails_alone(void **state) {
    CUcontext second = retain_primary(1);
    (void)state;
    CALL(lose_device, 0, CUDA_ERROR_ECC_UNCORRECTABLE);
    ASSERT_RESULT(CUDA_ERROR_ECC_UNCORRECTABLE, CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, second));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 1));
    ASSERT_RESULT(CUDA_ERROR_ECC_UNCORRECTABLE, CALL(cuDevicePrimaryCtxRetain, &second, 1)); /* no new context at all */
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, NULL));
    ASSERT_RESULT(CUDA_ERROR_ECC_UNCORRECTABLE, CALL(cuCtxSynchronize));
}

static void losing_a_device_ends_the_wait(void **state) {
    block_t block = make_block(0, GRANULE);
    waiter_t waiter = {.address = block.address};
    (void)state;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &waiter.context));
    ASSERT_CUDA(CALL(launch_add, NULL, block.address, 1, 1, GATE));
    assert_int_equal(pthread_create(&waiter.thread, NULL, synchronize, &waiter), 0);
    CALL(wait_until_synchronizing);
    CALL(lose_device, 0, CUDA_ERROR_LAUNCH_FAILED);
    assert_int_equal(pthread_join(waiter.thread, NULL), 0);
    ASSERT_RESULT(CUDA_ERROR_LAUNCH_FAILED, waiter.result);
    drop_block(&block);
}

static void peers_need_access(void **state) {
    block_t block = make_block(0, GRANULE);
    CUmemAccessDesc access = access_for(1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    unsigned long long flags = 99;
    CUdeviceptr local = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, retain_primary(1)));
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &local, 16));
    CUstream stream = make_stream(CU_STREAM_NON_BLOCKING);
    uint8_t host[16] = {0};
    /* Without access: neither into it, nor out of it. */
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyHtoDAsync_v2, block.address, host, 16, stream));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoD_v2, block.address, local, 16));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemcpyDtoD_v2, local, block.address, 16));
    ASSERT_CUDA(CALL(cudaMemcpyPeer, (void *)local, 1, (void *)block.address, 0, 16)); /* each device does its part */
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaMemcpyPeer, (void *)local, 0, (void *)block.address, 1, 16));
    /* Copies within device memory do not wait for their end, and the next one is another device's. */
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, retain_primary(0))); /* the owner may, with its own context */
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuMemcpyDtoD_v2, local, block.address, 16));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, NULL));
    ASSERT_CUDA(CALL(cuMemGetAccess, &flags, &access.location, block.address));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    ASSERT_CUDA(CALL(cuMemGetAccess, &flags, &access.location, block.address));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    ASSERT_CUDA(CALL(cuMemcpyDtoD_v2, local, block.address, 16));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_bytes(local, 16, TMS_SIM_POISON);
    ASSERT_CUDA(CALL(cuMemcpyHtoDAsync_v2, block.address, host, 16, stream));
    ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    assert_bytes(block.address, 16, 1);
    assert_bytes(block.address + 16, GRANULE - 16, TMS_SIM_POISON + 1);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_CUDA(CALL(cuMemFree_v2, local));
    drop_block(&block);
}

static void a_kernel_without_access_faults(void **state) {
    block_t block = make_block(0, GRANULE);
    CUcontext second = retain_primary(1);
    (void)state;
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, second));
    ASSERT_CUDA(CALL(launch_add, NULL, block.address, 1, 1, NO_GATE));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cuCtxSynchronize));
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, NULL));
    ASSERT_CUDA(CALL(cuCtxSynchronize)); /* the owner is not affected */
    assert_bytes(block.address, 1, TMS_SIM_POISON);
    drop_block(&block);
}

static void enabled_peers_touch_allocations(void **state) {
    CUdeviceptr memory = 0;
    CUcontext first = NULL, second = retain_primary(1);
    (void)state;
    ASSERT_CUDA(CALL(cuCtxGetCurrent, &first));
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &memory, 16));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, second));
    uint8_t host[16];
    ASSERT_CUDA(CALL(cuMemcpyDtoH_v2, host, memory, 16)); /* copies go through the host if need be */
    ASSERT_CUDA(CALL(cuCtxEnablePeerAccess, first, 0));
    ASSERT_RESULT(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CALL(cuCtxEnablePeerAccess, first, 0));
    ASSERT_CUDA(CALL(launch_add, NULL, memory, 16, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_bytes(memory, 16, TMS_SIM_POISON + 1);
    ASSERT_CUDA(CALL(cuMemFree_v2, memory));
    CALL(set_peer_capable, 0);
    CUmemAccessDesc access = access_for(1, CU_MEM_ACCESS_FLAGS_PROT_READ);
    block_t block = make_block(0, GRANULE);
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    drop_block(&block);
}

/* Threads that create, use and destroy memory concurrently: what the sanitizers check. */
static void *cycle(void *argument) {
    enum { CYCLES = 20 };
    waiter_t *waiter = argument;
    CUstream stream = NULL;
    waiter->result = CALL(cuCtxPushCurrent_v2, waiter->context);
    if (waiter->result == CUDA_SUCCESS) waiter->result = CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < CYCLES && waiter->result == CUDA_SUCCESS; i++) {
        CUdeviceptr address = 0;
        uint8_t last = 0;
        waiter->result = CALL(cuMemAlloc_v2, &address, GRANULE);
        if (waiter->result != CUDA_SUCCESS) break;
        waiter->result = CALL(launch_add, stream, address, GRANULE, (uint8_t)i, 0);
        if (waiter->result == CUDA_SUCCESS)
            waiter->result = CALL(cuMemcpyDtoHAsync_v2, &last, address + GRANULE - 1, 1, stream);
        if (last != (uint8_t)(TMS_SIM_POISON + i)) waiter->result = CUDA_ERROR_UNKNOWN;
        CUresult freed = CALL(cuMemFree_v2, address);
        if (waiter->result == CUDA_SUCCESS) waiter->result = freed;
    }
    if (stream) CALL(cuStreamDestroy_v2, stream);
    return NULL;
}

static void threads_do_not_disturb_one_another(void **state) {
    enum { THREADS = 4 };
    waiter_t waiters[THREADS] = {0};
    (void)state;
    for (int i = 0; i < THREADS; i++) {
        ASSERT_CUDA(CALL(cuCtxGetCurrent, &waiters[i].context));
        assert_int_equal(pthread_create(&waiters[i].thread, NULL, cycle, &waiters[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(waiters[i].thread, NULL), 0);
        ASSERT_CUDA(waiters[i].result);
    }
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TWO(unpinning_waits_for_its_device),     TWO(a_lost_device_fails_alone),
        ONE(losing_a_device_ends_the_wait),      TWO(peers_need_access),
        TWO(a_kernel_without_access_faults),     TWO(enabled_peers_touch_allocations),
        ONE(threads_do_not_disturb_one_another),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
