/* Guards the simulated GPU's NCCL: failures during operations, how they are reported, and how they end. */
#include "captured_stderr.h"
#include "nccl_fixture.h"

enum { TEXT_BYTES = 4096, PIECE = 64 };

static sim_nccl_result_t reduce(const rank_t *rank, size_t count) {
    return CALL(ncclAllReduce, rank->source, rank->destination, count, SIM_NCCL_UINT8, SIM_NCCL_SUM, rank->comm,
                rank->stream);
}

/* Aborts a rank's communicator: its work ends, and its stream continues. */
static void abort_rank(rank_t *rank) {
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cudaStreamQuery, rank->stream));
    ASSERT_NCCL(CALL(ncclCommAbort, rank->comm));
    rank->comm = NULL;
    ASSERT_CUDA(CALL(cudaStreamSynchronize, rank->stream));
}

/* Waits until both ranks have the error of a mismatch. Their messages, one line each, contain `expected`. */
static void await_mismatch(const rank_t *ranks, captured_stderr_t captured, const char *expected) {
    char text[TEXT_BYTES];
    sim_nccl_result_t first = await_error(&ranks[0]), second = await_error(&ranks[1]);
    capture_end(captured, text, sizeof text);
    assert_int_equal(first, SIM_NCCL_INVALID_USAGE);
    assert_int_equal(second, SIM_NCCL_INVALID_USAGE);
    assert_non_null(strstr(text, expected));
    assert_int_equal(count_lines(text), 2);
}

static void ranks_with_different_requests_get_an_error(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, PIECE);
    captured_stderr_t captured = capture_begin();
    ASSERT_NCCL(reduce(&ranks[0], 10));
    ASSERT_NCCL(
        CALL(ncclBroadcast, ranks[1].source, ranks[1].destination, 3, SIM_NCCL_FLOAT, 1, ranks[1].comm, ranks[1].stream));
    await_mismatch(ranks, captured,
                   "rank 0 calls ncclAllReduce (count 10, uint8, op 0, root 0) where rank 1 calls ncclBroadcast (count 3, "
                   "float32, op 0, root 1)");
    assert_int_equal(reduce(&ranks[0], 10), SIM_NCCL_INVALID_USAGE); /* nothing more begins */
    assert_bytes((uintptr_t)ranks[0].destination, PIECE, 0xee);
    abort_rank(&ranks[0]);
    abort_rank(&ranks[1]);
    drop_ranks(ranks, 2);
}

static void ranks_with_different_counts_get_an_error(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, PIECE);
    captured_stderr_t captured = capture_begin();
    ASSERT_NCCL(reduce(&ranks[0], 10));
    ASSERT_NCCL(reduce(&ranks[1], 11));
    await_mismatch(ranks, captured, "rank 1 calls ncclAllReduce (count 11, uint8, op 0, root 0) where rank 0 calls");
    for (int i = 0; i < 2; i++) abort_rank(&ranks[i]);
    drop_ranks(ranks, 2);
}

static void work_that_waits_is_aborted(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, PIECE);
    for (int i = 0; i < 3; i++) ASSERT_NCCL(reduce(&ranks[0], PIECE)); /* rank 1 takes part in none */
    ASSERT_CUDA(CALL(cudaMemsetAsync, ranks[0].source, 9, PIECE, ranks[0].stream));
    assert_int_equal(async_error(&ranks[0]), SIM_NCCL_SUCCESS);
    abort_rank(&ranks[0]);
    assert_bytes((uintptr_t)ranks[0].destination, PIECE, 0xee);
    assert_bytes((uintptr_t)ranks[0].source, PIECE, 9);
    drop_ranks(ranks, 2);
}

static void a_rank_that_has_left_is_not_waited_for(void **state) {
    rank_t ranks[2];
    char text[TEXT_BYTES];
    (void)state;
    make_ranks(ranks, 2, PIECE);
    ASSERT_NCCL(reduce(&ranks[0], PIECE));
    ASSERT_NCCL(reduce(&ranks[1], PIECE));
    synchronize(ranks, 2);
    ASSERT_NCCL(CALL(ncclCommDestroy, ranks[1].comm));
    ranks[1].comm = NULL;
    assert_int_equal(async_error(&ranks[0]), SIM_NCCL_SUCCESS); /* its departure is no error yet */
    captured_stderr_t captured = capture_begin();
    ASSERT_NCCL(CALL(ncclRecv, ranks[0].destination, PIECE, SIM_NCCL_UINT8, 1, ranks[0].comm, ranks[0].stream));
    sim_nccl_result_t error = await_error(&ranks[0]);
    capture_end(captured, text, sizeof text);
    assert_int_equal(error, SIM_NCCL_REMOTE);
    assert_non_null(
        strstr(text, "ncclRecv: rank 0 waits for rank 1, which is unavailable: it has destroyed its communicator"));
    ASSERT_NCCL(CALL(ncclCommDestroy, ranks[0].comm)); /* does not wait for operations that never complete */
    ranks[0].comm = NULL;
    synchronize(ranks, 2);
    drop_ranks(ranks, 2);
}

/* The other process: takes part in one operation and is killed. */
static int take_part_and_die(void) {
    sim_nccl_handle_t comm = NULL;
    sim_nccl_id_t id;
    uint8_t *memory = NULL;
    const char *text = getenv("ID");
    for (size_t i = 0; i < sizeof id; i++) sscanf(text + 2 * i, "%2hhx", (unsigned char *)&id.bytes[i]);
    if (CALL(cudaSetDevice, 1) != CUDA_SUCCESS || CALL(cudaMalloc, (void **)&memory, PIECE) != CUDA_SUCCESS) return 1;
    memset(memory, 2, PIECE);
    if (CALL(ncclCommInitRank, &comm, 2, id, 1) != SIM_NCCL_SUCCESS) return 2;
    if (CALL(ncclAllReduce, memory, memory, PIECE, SIM_NCCL_UINT8, SIM_NCCL_SUM, comm, NULL) != SIM_NCCL_SUCCESS) return 3;
    if (CALL(cudaDeviceSynchronize) != CUDA_SUCCESS) return 4;
    _exit(memory[PIECE - 1] == 5 ? 0 : 5);
}

typedef struct starting {
    sim_nccl_handle_t comm;
    sim_nccl_id_t id;
    sim_nccl_result_t result;
} starting_t;

static void *start(void *argument) {
    starting_t *starting = argument;
    CALL(cudaSetDevice, 0);
    starting->result = CALL(ncclCommInitRank, &starting->comm, 2, starting->id, 0);
    uint8_t *memory = NULL;
    if (starting->result == SIM_NCCL_SUCCESS && CALL(cudaMalloc, (void **)&memory, PIECE) == CUDA_SUCCESS) {
        memset(memory, 3, PIECE);
        starting->result = CALL(ncclAllReduce, memory, memory, PIECE, SIM_NCCL_UINT8, SIM_NCCL_SUM, starting->comm, NULL);
    }
    CALL(cudaDeviceSynchronize);
    CALL(cudaFree, memory);
    return NULL;
}

static void a_rank_that_has_died_is_not_waited_for(void **state) {
    static char variable[2 * sizeof(sim_nccl_id_t) + 4] = "ID=";
    const char *const variables[] = {variable, "TMS_SIMULATED_DEVICES=2", NULL};
    char text[TEXT_BYTES];
    starting_t starting = {.comm = NULL};
    rank_t rank = {.bytes = PIECE};
    pthread_t thread;
    (void)state;
    ASSERT_NCCL(CALL(ncclGetUniqueId, &starting.id));
    for (size_t i = 0; i < sizeof starting.id; i++)
        sprintf(variable + 3 + 2 * i, "%02x", (unsigned char)starting.id.bytes[i]);
    assert_int_equal(pthread_create(&thread, NULL, start, &starting), 0);
    assert_int_equal(run_again("take_part_and_die", variables, text, sizeof text), 0);
    assert_string_equal(text, "");
    assert_int_equal(pthread_join(thread, NULL), 0);
    ASSERT_NCCL(starting.result);
    rank.comm = starting.comm;
    ASSERT_CUDA(CALL(cudaStreamCreateWithFlags, &rank.stream, NON_BLOCKING_STREAM));
    ASSERT_CUDA(CALL(cudaMalloc, (void **)&rank.source, PIECE));
    ASSERT_CUDA(CALL(cudaMalloc, (void **)&rank.destination, PIECE));
    captured_stderr_t captured = capture_begin();
    ASSERT_NCCL(reduce(&rank, PIECE));
    sim_nccl_result_t error = await_error(&rank);
    capture_end(captured, text, sizeof text);
    assert_int_equal(error, SIM_NCCL_REMOTE);
    assert_non_null(strstr(text, "ncclAllReduce: rank 0 waits for rank 1, which is unavailable: its process has exited"));
    abort_rank(&rank);
    drop_ranks(&rank, 1);
}

/* An operation accesses memory when it runs, not when it is called: memory unmapped by then is a fault of the context. */
static void unmapped_memory_is_a_fault(void **state) {
    rank_t ranks[2];
    char text[TEXT_BYTES];
    block_t block = make_block(0, GRANULE);
    (void)state;
    make_ranks(ranks, 2, PIECE);
    captured_stderr_t captured = capture_begin();
    ASSERT_CUDA(CALL(launch_add, ranks[0].stream, (uintptr_t)ranks[0].source, 1, 0, 1));
    ASSERT_NCCL(CALL(ncclAllReduce, (void *)(uintptr_t)block.address, ranks[0].destination, PIECE, SIM_NCCL_UINT8,
                     SIM_NCCL_SUM, ranks[0].comm, ranks[0].stream));
    ASSERT_NCCL(reduce(&ranks[1], PIECE));
    unmap_block(&block);
    CALL(open_gate, 1);
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cudaStreamSynchronize, ranks[0].stream));
    sim_nccl_result_t own = await_error(&ranks[0]), others = await_error(&ranks[1]);
    capture_end(captured, text, sizeof text);
    assert_int_equal(own, SIM_NCCL_UNHANDLED_CUDA);
    assert_int_equal(others, SIM_NCCL_REMOTE);
    assert_non_null(strstr(text, "the work of rank 0 on device 0 failed: memory that it touches is not mapped"));
    assert_non_null(strstr(text, "rank 1 waits for rank 0, which is unavailable: its work has failed"));
    ASSERT_CUDA(CALL(cudaSetDevice, 1)); /* the context of device 0 is unusable */
    abort_rank(&ranks[1]);
    ASSERT_NCCL(CALL(ncclCommAbort, ranks[0].comm));
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, block.bytes));
    for (int i = 0; i < 2; i++) ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, i)); /* and with it everything left */
}

/* A destroyed context ends its work. */
static void a_destroyed_context_ends_the_work(void **state) {
    rank_t ranks[2];
    char text[TEXT_BYTES];
    (void)state;
    make_ranks(ranks, 2, PIECE);
    captured_stderr_t captured = capture_begin();
    ASSERT_NCCL(reduce(&ranks[0], PIECE));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    ASSERT_NCCL(CALL(ncclCommDestroy, ranks[0].comm));
    capture_end(captured, text, sizeof text);
    ASSERT_NCCL(CALL(ncclCommDestroy, ranks[1].comm));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 1));
}

static void arguments_are_checked(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, PIECE);
    const rank_t *rank = &ranks[0];
    uint8_t *memory = rank->source;
    assert_int_equal(CALL(ncclAllReduce, memory, memory, 1, SIM_NCCL_TYPES, 0, rank->comm, NULL), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclAllReduce, memory, memory, 1, 0, 77, rank->comm, NULL), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclAllReduce, NULL, memory, 1, 0, 0, rank->comm, NULL), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclBroadcast, memory, memory, 1, 0, 2, rank->comm, NULL), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclSend, memory, 1, 0, -1, rank->comm, NULL), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclAllReduce, memory, memory, 1, 0, 0, NULL, NULL), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclAllReduce, memory, memory, 1, 0, 0, rank->comm, ranks[1].stream), SIM_NCCL_UNHANDLED_CUDA);
    assert_non_null(strstr(CALL(ncclGetLastError, NULL), "is not a stream of device 0"));
    ASSERT_CUDA(CALL(cudaStreamQuery, rank->stream));
    assert_int_equal(CALL(fail_after, "ncclAllReduce", 0, 1, SIM_NCCL_SYSTEM), 0);
    assert_int_equal(reduce(rank, 1), SIM_NCCL_SYSTEM);
    assert_int_equal(CALL(calls, "ncclAllReduce"), 6);
    drop_ranks(ranks, 2);
}

int main(int count, char **arguments) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_more_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TEST(ranks_with_different_requests_get_an_error),
        TEST(ranks_with_different_counts_get_an_error),
        TEST(work_that_waits_is_aborted),
        TEST(a_rank_that_has_left_is_not_waited_for),
        TEST(a_rank_that_has_died_is_not_waited_for),
        TEST(unmapped_memory_is_a_fault),
        TEST(a_destroyed_context_ends_the_work),
        TEST(arguments_are_checked),
    };
    if (count > 1 && strcmp(arguments[1], "take_part_and_die") == 0) return take_part_and_die();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
