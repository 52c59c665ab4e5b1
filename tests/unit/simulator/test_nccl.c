/* Guards the simulated GPU's NCCL: collectives among ranks of one process, a device each. */
#include "nccl_fixture.h"

enum { MANY = 300007 }; /* elements of 4 bytes: more than one step, and not a multiple of the ranks */

static void fill(rank_t *ranks, int32_t count) {
    for (int i = 0; i < RANKS; i++) {
        for (int32_t k = 0; k < count; k++) ((int32_t *)ranks[i].source)[k] = k * (i + 1);
    }
}

#define ON_ALL(call_of_rank)                                                                                                \
    do {                                                                                                                    \
        ASSERT_NCCL(CALL(ncclGroupStart));                                                                                  \
        for (int i = 0; i < RANKS; i++) {                                                                                   \
            rank_t *rank = &ranks[i];                                                                                       \
            ASSERT_NCCL(call_of_rank);                                                                                      \
        }                                                                                                                   \
        ASSERT_NCCL(CALL(ncclGroupEnd));                                                                                    \
        synchronize(ranks, RANKS);                                                                                          \
    } while (0)

static void assert_number(int line, int rank, int32_t at, int32_t number, int32_t expected) {
    if (number != expected) fail_msg("line %d: rank %d has %d at %d, not %d", line, rank, number, at, expected);
}

/* Compares what each rank got with an expression of its number `i` and the element `k`. */
#define EXPECT(count, expression)                                                                                           \
    do {                                                                                                                    \
        for (int i = 0; i < RANKS; i++) {                                                                                   \
            for (int32_t k = 0; k < (count); k++)                                                                           \
                assert_number(__LINE__, i, k, ((const int32_t *)ranks[i].destination)[k], (expression));                    \
        }                                                                                                                   \
    } while (0)

static const int32_t untouched = (int32_t)0xeeeeeeee;

static void all_reduce_gives_all_the_same(void **state) {
    rank_t ranks[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, MANY * sizeof(int32_t));
    fill(ranks, MANY);
    ON_ALL(
        CALL(ncclAllReduce, rank->source, rank->destination, MANY, SIM_NCCL_INT32, SIM_NCCL_SUM, rank->comm, rank->stream));
    EXPECT(MANY, 6 * k);
    ON_ALL(CALL(ncclAllReduce, rank->source, rank->destination, 2, SIM_NCCL_INT32, SIM_NCCL_MAXIMUM, rank->comm,
                rank->stream)); /* fewer elements than ranks */
    EXPECT(4, k < 2 ? 3 * k : 6 * k);
    ON_ALL(CALL(ncclAllReduce, rank->source, rank->source, MANY, SIM_NCCL_INT32, SIM_NCCL_SUM, rank->comm, rank->stream));
    for (int i = 0; i < RANKS; i++) memcpy(ranks[i].destination, ranks[i].source, ranks[i].bytes);
    EXPECT(MANY, 6 * k);
    drop_ranks(ranks, RANKS);
}

static void broadcast_and_reduce_have_a_root(void **state) {
    rank_t ranks[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, MANY * sizeof(int32_t));
    fill(ranks, MANY);
    ON_ALL(CALL(ncclBroadcast, i == 2 ? rank->source : NULL, rank->destination, MANY, SIM_NCCL_INT32, 2, rank->comm,
                rank->stream));
    EXPECT(MANY, 3 * k);
    ON_ALL(CALL(ncclReduce, rank->source, i == 1 ? rank->destination : NULL, MANY, SIM_NCCL_INT32, SIM_NCCL_SUM, 1,
                rank->comm, rank->stream));
    EXPECT(MANY, i == 1 ? 6 * k : 3 * k);
    ON_ALL(CALL(ncclBcast, rank->destination, MANY, SIM_NCCL_INT32, 1, rank->comm, rank->stream));
    EXPECT(MANY, 6 * k);
    drop_ranks(ranks, RANKS);
}

static void gathering_and_scattering(void **state) {
    enum { EACH = MANY / RANKS };
    rank_t ranks[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, MANY * sizeof(int32_t));
    fill(ranks, MANY);
    ON_ALL(CALL(ncclAllGather, rank->source, rank->destination, EACH, SIM_NCCL_INT32, rank->comm, rank->stream));
    EXPECT(EACH * RANKS, k % EACH * (k / EACH + 1));
    ON_ALL(CALL(ncclReduceScatter, rank->source, rank->destination, EACH, SIM_NCCL_INT32, SIM_NCCL_SUM, rank->comm,
                rank->stream));
    EXPECT(EACH, 6 * (i * EACH + k));
    ON_ALL(CALL(ncclAlltoAll, rank->source, rank->destination, EACH, SIM_NCCL_INT32, rank->comm, rank->stream));
    EXPECT(EACH * RANKS, (i * EACH + k % EACH) * (k / EACH + 1));
    ON_ALL(CALL(ncclScatter, rank->source, rank->destination, EACH, SIM_NCCL_INT32, 1, rank->comm, rank->stream));
    EXPECT(EACH, 2 * (i * EACH + k));
    ON_ALL(CALL(ncclGather, rank->source, rank->destination, EACH, SIM_NCCL_INT32, 0, rank->comm, rank->stream));
    EXPECT(EACH, i ? 2 * (i * EACH + k) : k);
    assert_int_equal(((int32_t *)ranks[0].destination)[2 * EACH + 5], 3 * 5);
    drop_ranks(ranks, RANKS);
}

static void in_place_forms(void **state) {
    enum { EACH = MANY / RANKS };
    rank_t ranks[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, MANY * sizeof(int32_t));
    fill(ranks, MANY);
    for (int i = 0; i < RANKS; i++) memcpy(ranks[i].destination, ranks[i].source, ranks[i].bytes);
    ON_ALL(CALL(ncclReduceScatter, rank->destination, rank->destination + (size_t)i * EACH * 4, EACH, SIM_NCCL_INT32,
                SIM_NCCL_SUM, rank->comm, rank->stream));
    EXPECT(EACH * RANKS, k / EACH == i ? 6 * k : k * (i + 1));
    ON_ALL(CALL(ncclAllGather, rank->destination + (size_t)i * EACH * 4, rank->destination, EACH, SIM_NCCL_INT32, rank->comm,
                rank->stream));
    EXPECT(EACH * RANKS, 6 * k);
    ON_ALL(CALL(ncclAlltoAll, rank->source, rank->source, EACH, SIM_NCCL_INT32, rank->comm, rank->stream));
    for (int i = 0; i < RANKS; i++) memcpy(ranks[i].destination, ranks[i].source, ranks[i].bytes);
    EXPECT(EACH * RANKS, (i * EACH + k % EACH) * (k / EACH + 1));
    drop_ranks(ranks, RANKS);
}

static void nothing_is_done_for_no_elements(void **state) {
    rank_t ranks[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, 64);
    /* Not even waited for: the others do not take part. */
    ASSERT_NCCL(CALL(ncclAllReduce, NULL, NULL, 0, SIM_NCCL_FLOAT, SIM_NCCL_SUM, ranks[0].comm, ranks[0].stream));
    ASSERT_NCCL(CALL(ncclSend, NULL, 0, SIM_NCCL_FLOAT, 1, ranks[0].comm, ranks[0].stream));
    ASSERT_CUDA(CALL(cudaStreamSynchronize, ranks[0].stream));
    EXPECT(16, untouched);
    drop_ranks(ranks, RANKS);
}

/* An operation is work of its stream: the call returns, and work submitted earlier runs earlier. */
static void operations_are_work_of_their_streams(void **state) {
    rank_t ranks[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, 4);
    for (int i = 0; i < RANKS; i++) memset(ranks[i].source, i, 4);
    ASSERT_CUDA(CALL(launch_add, ranks[0].stream, (uintptr_t)ranks[0].source, 4, 10, 1));
    for (int i = 0; i < RANKS; i++) {
        ASSERT_NCCL(CALL(ncclAllReduce, ranks[i].source, ranks[i].destination, 4, SIM_NCCL_UINT8, SIM_NCCL_SUM,
                         ranks[i].comm, ranks[i].stream));
        ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cudaStreamQuery, ranks[i].stream));
    }
    EXPECT(1, untouched);
    CALL(open_gate, 1);
    synchronize(ranks, RANKS);
    EXPECT(1, 0x0d0d0d0d);
    drop_ranks(ranks, RANKS);
}

/* On several streams, operations of one communicator run in the order of the calls. */
static void operations_of_a_communicator_keep_their_order(void **state) {
    rank_t ranks[RANKS];
    CUstream other[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, 8);
    for (int i = 0; i < RANKS; i++) {
        memset(ranks[i].source, 1, 8);
        ASSERT_CUDA(CALL(cudaSetDevice, i));
        ASSERT_CUDA(CALL(cudaStreamCreateWithFlags, &other[i], NON_BLOCKING_STREAM));
    }
    ASSERT_CUDA(CALL(launch_add, ranks[1].stream, (uintptr_t)ranks[1].source, 1, 0, 1)); /* delays the first of rank 1 */
    for (int i = 0; i < RANKS; i++) {
        ASSERT_NCCL(CALL(ncclAllReduce, ranks[i].source, ranks[i].destination, 1, SIM_NCCL_INT32, SIM_NCCL_SUM,
                         ranks[i].comm, ranks[i].stream));
        ASSERT_NCCL(
            CALL(ncclBroadcast, ranks[i].source, ranks[i].destination + 4, 1, SIM_NCCL_INT32, 0, ranks[i].comm, other[i]));
    }
    CALL(open_gate, 1);
    for (int i = 0; i < RANKS; i++) ASSERT_CUDA(CALL(cudaStreamSynchronize, other[i]));
    EXPECT(2, k ? 0x01010101 : 0x03030303);
    for (int i = 0; i < RANKS; i++) ASSERT_CUDA(CALL(cudaStreamDestroy, other[i]));
    drop_ranks(ranks, RANKS);
}

static void an_operation_can_be_captured_and_replayed(void **state) {
    rank_t ranks[RANKS];
    CUgraph graphs[RANKS];
    CUgraphExec executables[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, 8);
    for (int i = 0; i < RANKS; i++) {
        ASSERT_CUDA(CALL(cudaStreamBeginCapture, ranks[i].stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        ASSERT_NCCL(CALL(ncclAllReduce, ranks[i].source, ranks[i].destination, 2, SIM_NCCL_INT32, SIM_NCCL_SUM,
                         ranks[i].comm, ranks[i].stream));
        ASSERT_CUDA(CALL(cudaStreamEndCapture, ranks[i].stream, &graphs[i]));
        ASSERT_CUDA(CALL(cudaGraphInstantiate, &executables[i], graphs[i], 0));
        ASSERT_CUDA(CALL(cudaGraphDestroy, graphs[i]));
    }
    EXPECT(2, untouched);
    for (int round = 1; round <= 3; round++) {
        for (int i = 0; i < RANKS; i++) {
            ((int32_t *)ranks[i].source)[0] = round;
            ((int32_t *)ranks[i].source)[1] = i;
            ASSERT_CUDA(CALL(cudaGraphLaunch, executables[i], ranks[i].stream));
        }
        synchronize(ranks, RANKS);
        EXPECT(2, k ? 3 : 3 * round);
    }
    for (int i = 0; i < RANKS; i++) ASSERT_NCCL(CALL(ncclCommDestroy, ranks[i].comm)), ranks[i].comm = NULL;
    for (int i = 0; i < RANKS; i++) ASSERT_CUDA(CALL(cudaGraphExecDestroy, executables[i]));
    drop_ranks(ranks, RANKS);
}

/* Ranks as threads, each of which waits for the others in its call. */
typedef struct threaded {
    sim_nccl_id_t id;
    int rank;
    int32_t sum;
} threaded_t;

static void *be_a_rank(void *argument) {
    threaded_t *own = argument;
    sim_nccl_handle_t comm = NULL;
    int32_t *memory = NULL;
    if (CALL(cudaSetDevice, own->rank) != CUDA_SUCCESS) return "device";
    if (CALL(ncclCommInitRank, &comm, RANKS, own->id, own->rank) != SIM_NCCL_SUCCESS) return "init";
    if (CALL(cudaMalloc, (void **)&memory, sizeof *memory) != CUDA_SUCCESS) return "malloc";
    *memory = own->rank + 1;
    /* On the default stream of the communicator's device. */
    if (CALL(ncclAllReduce, memory, memory, 1, SIM_NCCL_INT32, SIM_NCCL_SUM, comm, NULL) != SIM_NCCL_SUCCESS)
        return "reduce";
    if (CALL(cudaDeviceSynchronize) != CUDA_SUCCESS) return "synchronize";
    own->sum = *memory;
    if (CALL(cudaFree, memory) != CUDA_SUCCESS) return "free";
    return CALL(ncclCommDestroy, comm) == SIM_NCCL_SUCCESS ? NULL : "destroy";
}

static void ranks_may_be_threads(void **state) {
    pthread_t threads[RANKS];
    threaded_t own[RANKS] = {{.rank = 0}};
    (void)state;
    ASSERT_NCCL(CALL(ncclGetUniqueId, &own[0].id));
    for (int i = 0; i < RANKS; i++) {
        own[i].id = own[0].id;
        own[i].rank = i;
        assert_int_equal(pthread_create(&threads[i], NULL, be_a_rank, &own[i]), 0);
    }
    for (int i = 0; i < RANKS; i++) {
        void *failed = NULL;
        assert_int_equal(pthread_join(threads[i], &failed), 0);
        if (failed) fail_msg("rank %d: %s", i, (const char *)failed);
        assert_int_equal(own[i].sum, 6);
    }
}

static void a_rank_may_be_alone(void **state) {
    rank_t ranks[1];
    (void)state;
    make_ranks(ranks, 1, 8);
    memset(ranks[0].source, 5, 8);
    ASSERT_NCCL(CALL(ncclAllReduce, ranks[0].source, ranks[0].destination, 8, SIM_NCCL_UINT8, SIM_NCCL_AVERAGE,
                     ranks[0].comm, ranks[0].stream));
    synchronize(ranks, 1);
    assert_bytes((uintptr_t)ranks[0].destination, 8, 5);
    drop_ranks(ranks, 1);
}

static sim_nccl_result_t reduce_alone(const rank_t *rank, const void *source, void *destination) {
    return CALL(ncclReduce, source, destination, GRANULE, SIM_NCCL_UINT8, SIM_NCCL_SUM, 0, rank->comm, rank->stream);
}

/* The collective of one rank is a copy on its stream: it validates memory at the call, also in a group, and in place it is
 * nothing. */
static void a_collective_of_one_rank_is_a_copy(void **state) {
    rank_t ranks[1];
    block_t block = make_block(0, GRANULE);
    void *paused = (void *)(uintptr_t)block.address;
    (void)state;
    make_ranks(ranks, 1, GRANULE);
    memset(ranks[0].source, 5, GRANULE);
    ASSERT_CUDA(CALL(launch_add, ranks[0].stream, (uintptr_t)ranks[0].source, GRANULE, 2, 1));
    ASSERT_NCCL(CALL(ncclGroupStart));
    ASSERT_NCCL(reduce_alone(&ranks[0], ranks[0].source, paused));
    ASSERT_NCCL(CALL(ncclGroupEnd));
    assert_bytes(block.address, GRANULE, 0xa5); /* it waits for the work before it */
    CALL(open_gate, 1);
    synchronize(ranks, 1);
    assert_bytes(block.address, GRANULE, 7);
    unmap_block(&block);
    assert_int_equal(reduce_alone(&ranks[0], paused, ranks[0].destination), SIM_NCCL_UNHANDLED_CUDA);
    assert_non_null(strstr(CALL(ncclGetLastError, NULL), "accessible to device 0; resume paused memory"));
    assert_int_equal(reduce_alone(&ranks[0], NULL, ranks[0].destination), SIM_NCCL_UNHANDLED_CUDA);
    ASSERT_NCCL(CALL(ncclGroupStart));
    assert_int_equal(reduce_alone(&ranks[0], ranks[0].source, paused), SIM_NCCL_UNHANDLED_CUDA);
    assert_int_equal(CALL(ncclGroupEnd), SIM_NCCL_UNHANDLED_CUDA);
    ASSERT_NCCL(reduce_alone(&ranks[0], paused, paused));
    synchronize(ranks, 1); /* the context has no error */
    assert_int_equal(async_error(&ranks[0]), SIM_NCCL_SUCCESS);
    assert_bytes((uintptr_t)ranks[0].destination, GRANULE, 0xee);
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, block.bytes));
    drop_ranks(ranks, 1);
}

int main(void) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_more_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TEST(all_reduce_gives_all_the_same),
        TEST(broadcast_and_reduce_have_a_root),
        TEST(gathering_and_scattering),
        TEST(in_place_forms),
        TEST(nothing_is_done_for_no_elements),
        TEST(operations_are_work_of_their_streams),
        TEST(operations_of_a_communicator_keep_their_order),
        TEST(an_operation_can_be_captured_and_replayed),
        TEST(ranks_may_be_threads),
        TEST(a_rank_may_be_alone),
        TEST(a_collective_of_one_rank_is_a_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
