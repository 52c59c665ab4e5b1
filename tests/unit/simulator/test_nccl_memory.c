/* Guards the simulated GPU's NCCL: the memory that communicators hold, allocations, registrations, and functions that are
 * not simulated. */
#include "captured_stderr.h"
#include "nccl_fixture.h"

enum { HELD = 16 << 20 };

static uint64_t statistic(const rank_t *rank, int which) {
    uint64_t value = 0;
    ASSERT_NCCL(CALL(ncclCommMemStats, rank->comm, which, &value));
    return value;
}

static void communicators_hold_memory_of_their_devices(void **state) {
    sim_nccl_handle_t comms[2], more[2], none[2];
    (void)state;
    ASSERT_NCCL(CALL(ncclCommInitAll, comms, 2, NULL));
    assert_int_equal(usage_of(0).physical_bytes, HELD);
    assert_int_equal(usage_of(1).physical_bytes, HELD);
    ASSERT_NCCL(CALL(ncclCommInitAll, more, 2, NULL));
    assert_int_equal(usage_of(0).physical_bytes, 2 * HELD);
    assert_int_equal(CALL(take_memory, 1, DEVICE_MEMORY - 3 * HELD + 1), 0);
    assert_int_equal(CALL(ncclCommInitAll, none, 2, NULL), SIM_NCCL_UNHANDLED_CUDA); /* one byte is missing on device 1 */
    assert_non_null(strstr(CALL(ncclGetLastError, NULL), "out of memory: a communicator takes 16777216 bytes of device 1"));
    assert_int_equal(usage_of(0).physical_bytes, 2 * HELD);
    ASSERT_NCCL(CALL(ncclCommAbort, comms[0]));
    assert_int_equal(usage_of(0).physical_bytes, HELD);
    ASSERT_NCCL(CALL(ncclCommDestroy, comms[1]));
    for (int i = 0; i < 2; i++) ASSERT_NCCL(CALL(ncclCommDestroy, more[i]));
}

static void a_suspended_communicator_holds_nothing(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, 64);
    uint64_t others = usage_of(0).physical_bytes - HELD;
    assert_int_equal(statistic(&ranks[0], SIM_NCCL_CAN_SUSPEND), HELD);
    assert_int_equal(statistic(&ranks[0], SIM_NCCL_IS_SUSPENDED), 0);
    assert_int_equal(statistic(&ranks[0], SIM_NCCL_STAYS), 0);
    assert_int_equal(statistic(&ranks[0], SIM_NCCL_TOTAL), HELD);
    assert_int_equal(CALL(ncclCommSuspend, ranks[0].comm, 0), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommResume, ranks[0].comm), SIM_NCCL_INVALID_USAGE);
    for (int i = 0; i < 2; i++) ASSERT_NCCL(CALL(ncclCommSuspend, ranks[i].comm, SIM_NCCL_SUSPEND_MEMORY));
    assert_int_equal(usage_of(0).physical_bytes, others);
    assert_int_equal(statistic(&ranks[0], SIM_NCCL_IS_SUSPENDED), 1);
    assert_int_equal(CALL(ncclCommSuspend, ranks[0].comm, SIM_NCCL_SUSPEND_MEMORY), SIM_NCCL_INVALID_USAGE);
    assert_int_equal(CALL(ncclBcast, ranks[0].source, 1, 0, 0, ranks[0].comm, ranks[0].stream), SIM_NCCL_INVALID_USAGE);
    uint64_t taken = DEVICE_MEMORY - others;
    assert_int_equal(CALL(take_memory, 0, (int64_t)taken), 0);
    assert_int_equal(CALL(ncclCommResume, ranks[0].comm), SIM_NCCL_UNHANDLED_CUDA); /* the memory has another owner now */
    assert_int_equal(CALL(take_memory, 0, -(int64_t)taken), 0);
    for (int i = 0; i < 2; i++) ASSERT_NCCL(CALL(ncclCommResume, ranks[i].comm));
    assert_int_equal(usage_of(0).physical_bytes, others + HELD);
    for (int i = 0; i < 2; i++) ASSERT_NCCL(CALL(ncclBcast, ranks[i].source, 1, 0, 0, ranks[i].comm, ranks[i].stream));
    synchronize(ranks, 2);
    drop_ranks(ranks, 2);
}

static void work_in_flight_is_not_suspended(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, 64);
    ASSERT_NCCL(CALL(ncclBcast, ranks[0].source, 1, 0, 1, ranks[0].comm, ranks[0].stream));
    assert_int_equal(CALL(ncclCommSuspend, ranks[0].comm, SIM_NCCL_SUSPEND_MEMORY), SIM_NCCL_INVALID_USAGE);
    ASSERT_NCCL(CALL(ncclBcast, ranks[1].source, 1, 0, 1, ranks[1].comm, ranks[1].stream));
    synchronize(ranks, 2);
    drop_ranks(ranks, 2);
}

static void allocations_are_mapped_handles(void **state) {
    void *memory = NULL;
    CUmemGenericAllocationHandle handle = 0;
    (void)state;
    ASSERT_NCCL(CALL(ncclMemAlloc, &memory, 5));
    assert_int_equal(usage_of(0).physical_bytes, GRANULE);
    ASSERT_CUDA(CALL(cuMemRetainAllocationHandle, &handle, memory));
    ASSERT_CUDA(CALL(cuMemRelease, handle));
    ASSERT_CUDA(CALL(cudaMemset, memory, 3, GRANULE));
    ASSERT_CUDA(CALL(cudaDeviceSynchronize));
    assert_bytes((uintptr_t)memory, GRANULE, 3);
    assert_int_equal(CALL(ncclMemFree, (char *)memory + 1), SIM_NCCL_INVALID_ARGUMENT);
    ASSERT_NCCL(CALL(ncclMemFree, memory));
    ASSERT_NCCL(CALL(ncclMemFree, NULL));
    assert_int_equal(CALL(ncclMemAlloc, &memory, DEVICE_MEMORY + 1), SIM_NCCL_UNHANDLED_CUDA);
    assert_int_equal(CALL(ncclMemAlloc, NULL, 1), SIM_NCCL_UNHANDLED_CUDA);
    ASSERT_NCCL(CALL(ncclMemAlloc, &memory, 0));
    assert_null(memory);
}

static void registrations_are_of_memory_that_is_there(void **state) {
    rank_t ranks[1];
    void *registration = NULL;
    block_t block = make_block(0, GRANULE);
    (void)state;
    make_ranks(ranks, 1, 64);
    ASSERT_NCCL(CALL(ncclCommRegister, ranks[0].comm, (void *)(uintptr_t)block.address, GRANULE, &registration));
    assert_int_equal(CALL(ncclCommDeregister, ranks[0].comm, &registration), SIM_NCCL_INVALID_ARGUMENT);
    ASSERT_NCCL(CALL(ncclCommDeregister, ranks[0].comm, registration));
    assert_int_equal(CALL(ncclCommDeregister, ranks[0].comm, registration), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommRegister, ranks[0].comm, (void *)(uintptr_t)block.address, GRANULE + 1, &registration),
                     SIM_NCCL_INVALID_ARGUMENT);
    drop_block(&block);
    assert_int_equal(CALL(ncclCommRegister, ranks[0].comm, (void *)(uintptr_t)block.address, GRANULE, &registration),
                     SIM_NCCL_INVALID_ARGUMENT);
    drop_ranks(ranks, 1);
}

static void functions_that_are_not_simulated_say_so_once(void **state) {
    char text[1024];
    void *window = &text;
    int version = 0;
    (void)state;
    ASSERT_NCCL(CALL(ncclGetVersion, &version));
    assert_int_equal(version, SIM_NCCL_VERSION);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < 2; i++) {
        assert_int_equal(CALL(ncclCommWindowRegister, NULL, text, 1, &window, 0), SIM_NCCL_INVALID_USAGE);
        assert_int_equal(CALL(ncclDevCommCreate, NULL, NULL, NULL), SIM_NCCL_INVALID_USAGE);
        assert_int_equal(CALL(ncclDevCommDestroy, NULL, NULL), SIM_NCCL_INVALID_USAGE);
        assert_int_equal(CALL(ncclCommWindowDeregister, NULL, NULL), SIM_NCCL_INVALID_USAGE);
        ASSERT_NCCL(CALL(ncclGroupStart));
        assert_int_equal(CALL(ncclGroupSimulateEnd, NULL), SIM_NCCL_INVALID_USAGE); /* and the group is over */
        assert_int_equal(CALL(ncclGroupEnd), SIM_NCCL_INVALID_USAGE);
    }
    capture_end(captured, text, sizeof text);
    assert_null(window);
    assert_int_equal(count_lines(text), 5);
    assert_non_null(strstr(text, "simulated GPU: ncclDevCommCreate is not simulated and fails\n"));
}

int main(void) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_more_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TEST(communicators_hold_memory_of_their_devices),
        TEST(a_suspended_communicator_holds_nothing),
        TEST(work_in_flight_is_not_suspended),
        TEST(allocations_are_mapped_handles),
        TEST(registrations_are_of_memory_that_is_there),
        TEST(functions_that_are_not_simulated_say_so_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
