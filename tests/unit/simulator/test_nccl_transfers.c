/* Guards the simulated GPU's NCCL: sends, receives and groups of them. */
#include "captured_stderr.h"
#include "nccl_fixture.h"

#include <sched.h>

enum { LONG = 1 << 20 };  /* bytes: many times what a ring holds */
enum { LOOKS = 1 << 15 }; /* in which work that waits for nothing completes */

static void fill(rank_t *ranks, int count) {
    for (int i = 0; i < count; i++) {
        for (size_t k = 0; k < ranks[i].bytes; k++) ranks[i].source[k] = (uint8_t)(k * 7 + k / 251 + (size_t)i);
    }
}

static void assert_copied(const uint8_t *destination, const uint8_t *source, size_t bytes) {
    if (memcmp(destination, source, bytes) != 0) fail_msg("the bytes are others");
}

static void a_message_arrives(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, LONG + 3);
    fill(ranks, 2);
    ASSERT_NCCL(CALL(ncclSend, ranks[0].source, LONG + 3, SIM_NCCL_UINT8, 1, ranks[0].comm, ranks[0].stream));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cudaStreamQuery, ranks[0].stream)); /* too long to be sent without the other */
    ASSERT_NCCL(CALL(ncclRecv, ranks[1].destination, LONG + 3, SIM_NCCL_UINT8, 0, ranks[1].comm, ranks[1].stream));
    synchronize(ranks, 2);
    assert_copied(ranks[1].destination, ranks[0].source, LONG + 3);
    drop_ranks(ranks, 2);
}

/* Both send first, and more than fits into any buffer: they complete only together. */
static void sends_and_receives_of_a_group_go_on_together(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, LONG);
    fill(ranks, 2);
    for (int i = 0; i < 2; i++) {
        ASSERT_NCCL(CALL(ncclGroupStart));
        ASSERT_NCCL(CALL(ncclGroupStart)); /* the inner end has no effect */
        ASSERT_NCCL(CALL(ncclSend, ranks[i].source, LONG, SIM_NCCL_UINT8, 1 - i, ranks[i].comm, ranks[i].stream));
        ASSERT_NCCL(CALL(ncclGroupEnd));
        ASSERT_CUDA(CALL(cudaStreamQuery, ranks[i].stream));
        ASSERT_NCCL(CALL(ncclRecv, ranks[i].destination, LONG, SIM_NCCL_UINT8, 1 - i, ranks[i].comm, ranks[i].stream));
        ASSERT_NCCL(CALL(ncclGroupEnd));
    }
    synchronize(ranks, 2);
    for (int i = 0; i < 2; i++) assert_copied(ranks[i].destination, ranks[1 - i].source, LONG);
    drop_ranks(ranks, 2);
}

/* All to all, in a different order on each rank, itself included; two messages to each arrive in the order of the calls. */
static void all_to_all_works_in_any_order(void **state) {
    enum { PART = LONG / RANKS / 2 };
    rank_t ranks[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, LONG);
    fill(ranks, RANKS);
    for (int i = 0; i < RANKS; i++) {
        rank_t *rank = &ranks[i];
        ASSERT_NCCL(CALL(ncclGroupStart));
        for (int k = 0; k < 2 * RANKS; k++) {
            int peer = (k + i) % RANKS, half = k / RANKS;
            size_t offset = (size_t)(peer * 2 + half) * PART;
            if (i == 1) ASSERT_NCCL(CALL(ncclRecv, rank->destination + offset, PART, 1, peer, rank->comm, rank->stream));
            ASSERT_NCCL(CALL(ncclSend, rank->source + offset, PART, 1, peer, rank->comm, rank->stream));
            if (i != 1) ASSERT_NCCL(CALL(ncclRecv, rank->destination + offset, PART, 1, peer, rank->comm, rank->stream));
        }
        ASSERT_NCCL(CALL(ncclGroupEnd));
    }
    synchronize(ranks, RANKS);
    for (int i = 0; i < RANKS; i++) {
        for (int from = 0; from < RANKS; from++)
            assert_copied(ranks[i].destination + (size_t)from * 2 * PART, ranks[from].source + (size_t)i * 2 * PART,
                          2 * PART);
    }
    drop_ranks(ranks, RANKS);
}

/* In a group, on two streams: both streams wait for the whole. */
static void a_group_may_be_on_several_streams(void **state) {
    rank_t ranks[2];
    CUstream other = NULL;
    (void)state;
    make_ranks(ranks, 2, LONG);
    fill(ranks, 2);
    ASSERT_CUDA(CALL(cudaStreamCreateWithFlags, &other, NON_BLOCKING_STREAM)); /* of device 0 */
    ASSERT_CUDA(CALL(launch_add, other, (uintptr_t)ranks[0].source, 1, 1, 1));
    ASSERT_NCCL(CALL(ncclGroupStart));
    ASSERT_NCCL(CALL(ncclSend, ranks[0].source, LONG, SIM_NCCL_UINT8, 1, ranks[0].comm, ranks[0].stream));
    ASSERT_NCCL(CALL(ncclRecv, ranks[0].destination, LONG, SIM_NCCL_UINT8, 1, ranks[0].comm, other));
    ASSERT_NCCL(CALL(ncclGroupEnd));
    ASSERT_NCCL(CALL(ncclGroupStart));
    ASSERT_NCCL(CALL(ncclRecv, ranks[1].destination, LONG, SIM_NCCL_UINT8, 0, ranks[1].comm, ranks[1].stream));
    ASSERT_NCCL(CALL(ncclSend, ranks[1].source, LONG, SIM_NCCL_UINT8, 0, ranks[1].comm, ranks[1].stream));
    ASSERT_NCCL(CALL(ncclGroupEnd));
    /* Rank 0's part waits for the gate, which is in the other stream. */
    for (int i = 0; i < LOOKS; i++) {
        ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cudaStreamQuery, ranks[1].stream));
        (void)sched_yield();
    }
    CALL(open_gate, 1);
    ASSERT_CUDA(CALL(cudaStreamSynchronize, other));
    assert_copied(ranks[0].destination, ranks[1].source, LONG);
    synchronize(ranks, 2);
    assert_copied(ranks[1].destination, ranks[0].source, LONG); /* with the other stream's earlier additions */
    ASSERT_CUDA(CALL(cudaStreamDestroy, other));
    drop_ranks(ranks, 2);
}

static void a_captured_group_is_replayed(void **state) {
    rank_t ranks[2];
    CUgraph graph = NULL;
    CUgraphExec executables[2];
    (void)state;
    make_ranks(ranks, 2, LONG);
    for (int i = 0; i < 2; i++) {
        ASSERT_CUDA(CALL(cudaStreamBeginCapture, ranks[i].stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        ASSERT_NCCL(CALL(ncclGroupStart));
        ASSERT_NCCL(CALL(ncclSend, ranks[i].source, LONG, SIM_NCCL_UINT8, 1 - i, ranks[i].comm, ranks[i].stream));
        ASSERT_NCCL(CALL(ncclRecv, ranks[i].destination, LONG, SIM_NCCL_UINT8, 1 - i, ranks[i].comm, ranks[i].stream));
        ASSERT_NCCL(CALL(ncclGroupEnd));
        ASSERT_CUDA(CALL(cudaStreamEndCapture, ranks[i].stream, &graph));
        ASSERT_CUDA(CALL(cudaGraphInstantiate, &executables[i], graph, 0));
        ASSERT_CUDA(CALL(cudaGraphDestroy, graph));
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2; i++) memset(ranks[i].source, round * 2 + i, LONG);
        for (int i = 0; i < 2; i++) ASSERT_CUDA(CALL(cudaGraphLaunch, executables[i], ranks[i].stream));
        synchronize(ranks, 2);
        for (int i = 0; i < 2; i++) assert_copied(ranks[i].destination, ranks[1 - i].source, LONG);
    }
    for (int i = 0; i < 2; i++) ASSERT_CUDA(CALL(cudaGraphExecDestroy, executables[i]));
    drop_ranks(ranks, 2);
}

static void messages_of_another_length_are_detected(void **state) {
    rank_t ranks[2];
    char text[1024];
    (void)state;
    make_ranks(ranks, 2, 64);
    captured_stderr_t captured = capture_begin();
    ASSERT_NCCL(CALL(ncclSend, ranks[0].source, 16, SIM_NCCL_UINT8, 1, ranks[0].comm, ranks[0].stream));
    ASSERT_NCCL(CALL(ncclRecv, ranks[1].destination, 16, SIM_NCCL_FLOAT, 0, ranks[1].comm, ranks[1].stream));
    sim_nccl_result_t error = await_error(&ranks[1]);
    capture_end(captured, text, sizeof text);
    assert_int_equal(error, SIM_NCCL_INVALID_USAGE);
    assert_non_null(strstr(text, "ncclRecv: rank 1 expects 64 bytes from rank 0, which sends 16 with ncclSend"));
    assert_non_null(strstr(CALL(ncclGetLastError, NULL), "rank 1 expects 64 bytes"));
    assert_bytes((uintptr_t)ranks[1].destination, 64, 0xee);
    ASSERT_NCCL(CALL(ncclCommAbort, ranks[1].comm));
    ranks[1].comm = NULL;
    synchronize(ranks, 2);
    drop_ranks(ranks, 2);
}

static void a_group_that_failed_does_nothing(void **state) {
    rank_t ranks[2];
    (void)state;
    make_ranks(ranks, 2, 64);
    assert_int_equal(CALL(ncclGroupEnd), SIM_NCCL_INVALID_USAGE);
    ASSERT_NCCL(CALL(ncclGroupStart));
    ASSERT_NCCL(CALL(ncclSend, ranks[0].source, LONG, SIM_NCCL_UINT8, 1, ranks[0].comm, ranks[0].stream));
    assert_int_equal(CALL(ncclRecv, ranks[0].destination, 1, SIM_NCCL_UINT8, 2, ranks[0].comm, ranks[0].stream),
                     SIM_NCCL_INVALID_ARGUMENT);
    assert_string_equal(CALL(ncclGetLastError, NULL), "ncclRecv: there is no rank 2 among 2");
    assert_int_equal(CALL(ncclGroupEnd), SIM_NCCL_INVALID_ARGUMENT);
    ASSERT_CUDA(CALL(cudaStreamQuery, ranks[0].stream));
    ASSERT_NCCL(CALL(ncclGroupStart));
    ASSERT_NCCL(CALL(ncclGroupEnd)); /* the next one is a new one */
    drop_ranks(ranks, 2);
}

int main(void) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_more_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TEST(a_message_arrives),
        TEST(sends_and_receives_of_a_group_go_on_together),
        TEST(all_to_all_works_in_any_order),
        TEST(a_group_may_be_on_several_streams),
        TEST(a_captured_group_is_replayed),
        TEST(messages_of_another_length_are_detected),
        TEST(a_group_that_failed_does_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
