/* Guards the simulated GPU's NCCL: creation of communicators, alone, from others, and non-blocking, and refused arguments.
 */
#include <sys/wait.h>

#include "nccl_fixture.h"
#include "simulator/nccl/exchange.h"

static const sim_nccl_config_t not_blocking = {
    .size = sizeof not_blocking, .magic = 0xcafebeef, .version = SIM_NCCL_VERSION, .blocking = 0};

/* The sum of 1 << (number of the rank in the fixture) over a communicator's ranks: shows which ranks are in it. */
static void sum_of_bits(rank_t *ranks, const sim_nccl_handle_t *comms, int count) {
    for (int i = 0; i < count; i++) {
        if (!comms[i]) continue;
        *(int32_t *)ranks[i].source = 1 << i;
        ASSERT_NCCL(CALL(ncclAllReduce, ranks[i].source, ranks[i].destination, 1, SIM_NCCL_INT32, SIM_NCCL_SUM, comms[i],
                         ranks[i].stream));
    }
    synchronize(ranks, count);
}

static void assert_member(const rank_t *rank, sim_nccl_handle_t comm, int number, int count, int32_t members) {
    int own = -1, all = -1, device = -1;
    ASSERT_NCCL(CALL(ncclCommUserRank, comm, &own));
    ASSERT_NCCL(CALL(ncclCommCount, comm, &all));
    ASSERT_NCCL(CALL(ncclCommCuDevice, comm, &device));
    assert_int_equal(own, number);
    assert_int_equal(all, count);
    assert_int_equal(*(int32_t *)rank->destination, members);
    assert_true(device >= 0);
}

static void a_communicator_is_split(void **state) {
    enum { COUNT = MORE_DEVICES };
    rank_t ranks[COUNT];
    sim_nccl_handle_t made[COUNT];
    const int colors[COUNT] = {5, SIM_NCCL_NO_COLOR, 5, -2}, keys[COUNT] = {9, 0, -3, 0};
    (void)state;
    make_ranks(ranks, COUNT, 4);
    for (int round = 0; round < 3; round++) { /* one after the other from the same */
        memset(made, 0xff, sizeof made);
        ASSERT_NCCL(CALL(ncclGroupStart));
        for (int i = 0; i < COUNT; i++) ASSERT_NCCL(CALL(ncclCommSplit, ranks[i].comm, colors[i], keys[i], &made[i], NULL));
        ASSERT_NCCL(CALL(ncclGroupEnd));
        assert_null(made[1]);
        sum_of_bits(ranks, made, COUNT);
        assert_member(&ranks[0], made[0], 1, 2, 5);
        assert_member(&ranks[2], made[2], 0, 2, 5);
        assert_member(&ranks[3], made[3], 0, 1, 8);
        for (int i = 0; i < COUNT; i++) {
            if (made[i]) ASSERT_NCCL(CALL(ncclCommDestroy, made[i]));
        }
    }
    assert_int_equal(CALL(ncclCommSplit, ranks[0].comm, 0, 0, NULL, NULL), SIM_NCCL_INVALID_ARGUMENT);
    drop_ranks(ranks, COUNT);
}

static void shrinking_leaves_ranks_out(void **state) {
    rank_t ranks[RANKS];
    sim_nccl_handle_t made[RANKS] = {NULL};
    const int excluded[] = {1};
    (void)state;
    make_ranks(ranks, RANKS, 4);
    assert_int_equal(CALL(ncclCommShrink, ranks[1].comm, excluded, 1, &made[1], NULL, 0), SIM_NCCL_INVALID_ARGUMENT);
    /* The flag aborts work in which the excluded rank does not take part. */
    ASSERT_NCCL(CALL(ncclAllReduce, ranks[0].source, ranks[0].destination, 1, SIM_NCCL_INT32, SIM_NCCL_SUM, ranks[0].comm,
                     ranks[0].stream));
    ASSERT_NCCL(CALL(ncclGroupStart));
    for (int i = 0; i < RANKS; i += 2)
        ASSERT_NCCL(CALL(ncclCommShrink, ranks[i].comm, excluded, 1, &made[i], NULL, SIM_NCCL_SHRINK_ABORT));
    ASSERT_NCCL(CALL(ncclGroupEnd));
    ASSERT_CUDA(CALL(cudaStreamSynchronize, ranks[0].stream));
    sum_of_bits(ranks, made, RANKS);
    assert_member(&ranks[0], made[0], 0, 2, 5);
    assert_member(&ranks[2], made[2], 1, 2, 5);
    for (int i = 0; i < RANKS; i += 2) ASSERT_NCCL(CALL(ncclCommDestroy, made[i]));
    drop_ranks(ranks, RANKS);
}

static void await_ready(sim_nccl_handle_t comm) {
    sim_nccl_result_t error = SIM_NCCL_IN_PROGRESS;
    while (error == SIM_NCCL_IN_PROGRESS) ASSERT_NCCL(CALL(ncclCommGetAsyncError, comm, &error));
    assert_int_equal(error, SIM_NCCL_SUCCESS);
}

static void calls_that_do_not_block(void **state) {
    sim_nccl_handle_t comms[2], made[2], another = NULL;
    sim_nccl_result_t error = SIM_NCCL_SUCCESS;
    sim_nccl_id_t id;
    (void)state;
    ASSERT_NCCL(CALL(ncclGetUniqueId, &id));
    assert_int_equal(CALL(ncclCommInitRankConfig, &comms[0], 2, id, 0, &not_blocking), SIM_NCCL_IN_PROGRESS);
    ASSERT_NCCL(CALL(ncclCommGetAsyncError, comms[0], &error));
    assert_int_equal(error, SIM_NCCL_IN_PROGRESS);
    assert_int_equal(CALL(ncclAllReduce, &id, &id, 1, 0, 0, comms[0], NULL), SIM_NCCL_INVALID_ARGUMENT); /* not ready */
    ASSERT_CUDA(CALL(cudaSetDevice, 1));
    ASSERT_NCCL(CALL(ncclCommInitRankConfig, &comms[1], 2, id, 1, &not_blocking)); /* the last one finds all there */
    await_ready(comms[0]);
    assert_int_equal(CALL(ncclCommSplit, comms[0], 1, 0, &made[0], NULL), SIM_NCCL_IN_PROGRESS);
    ASSERT_NCCL(CALL(ncclCommGetAsyncError, comms[0], &error)); /* the parent reports it, too */
    assert_int_equal(error, SIM_NCCL_IN_PROGRESS);
    assert_int_equal(CALL(ncclCommSplit, comms[0], 1, 0, &another, NULL), SIM_NCCL_INVALID_USAGE);
    assert_int_equal(CALL(ncclCommSplit, comms[1], 1, 0, &made[1], NULL), SIM_NCCL_IN_PROGRESS); /* rank 0 makes it */
    await_ready(comms[0]);
    await_ready(comms[1]);
    await_ready(made[0]);
    await_ready(made[1]);
    for (int i = 0; i < 2; i++) {
        ASSERT_NCCL(CALL(ncclCommFinalize, made[i]));
        ASSERT_NCCL(CALL(ncclCommDestroy, made[i]));
        ASSERT_NCCL(CALL(ncclCommDestroy, comms[i]));
    }
}

static void a_communicator_that_is_not_ready_is_aborted(void **state) {
    sim_nccl_handle_t comm = NULL;
    sim_nccl_result_t error = SIM_NCCL_SUCCESS;
    sim_nccl_id_t id;
    (void)state;
    ASSERT_NCCL(CALL(ncclGetUniqueId, &id));
    assert_int_equal(CALL(ncclCommInitRankConfig, &comm, 2, id, 0, &not_blocking), SIM_NCCL_IN_PROGRESS);
    ASSERT_NCCL(CALL(ncclCommAbort, comm));
    assert_int_equal(CALL(ncclCommGetAsyncError, comm, &error), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommAbort, comm), SIM_NCCL_INVALID_ARGUMENT);
}

static void mismatched_arguments_are_refused(void **state) {
    sim_nccl_handle_t comm = NULL, other = NULL, comms[MORE_DEVICES + 1];
    sim_nccl_config_t wrong = {.size = sizeof wrong, .magic = 1};
    sim_nccl_id_t id, nonsense;
    const int twice[] = {1, 1};
    (void)state;
    memset(&nonsense, 7, sizeof nonsense);
    ASSERT_NCCL(CALL(ncclGetUniqueId, &id));
    assert_int_equal(CALL(ncclCommInitRank, &comm, 2, nonsense, 0), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommInitRank, &comm, 2, id, 2), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommInitRank, &comm, SIM_NCCL_MAX_RANKS + 1, id, 0), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommInitRankConfig, &comm, 2, id, 0, &wrong), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommInitRankConfig, &comm, 2, id, 0, &not_blocking), SIM_NCCL_IN_PROGRESS);
    assert_int_equal(CALL(ncclCommInitRank, &other, 2, id, 1), SIM_NCCL_INVALID_USAGE);
    assert_string_equal(CALL(ncclGetLastError, NULL),
                        "ncclCommInitRank: rank 1 and rank 0 are both on device 0; give each rank its own device");
    assert_null(other);
    ASSERT_CUDA(CALL(cudaSetDevice, 1));
    assert_int_equal(CALL(ncclCommInitRank, &other, 2, id, 0), SIM_NCCL_INVALID_USAGE);
    assert_int_equal(CALL(ncclCommInitRank, &other, 3, id, 1), SIM_NCCL_INVALID_ARGUMENT);
    ASSERT_NCCL(CALL(ncclCommInitRankScalable, &other, 2, 1, 1, &id, NULL)); /* and is as before after all that */
    await_ready(comm);
    ASSERT_NCCL(CALL(ncclCommDestroy, comm));
    ASSERT_NCCL(CALL(ncclCommDestroy, other));
    assert_int_equal(CALL(ncclCommInitAll, comms, 2, twice), SIM_NCCL_INVALID_USAGE);
    assert_int_equal(CALL(ncclCommInitAll, comms, MORE_DEVICES + 1, NULL), SIM_NCCL_INVALID_ARGUMENT);
    assert_string_equal(CALL(ncclGetErrorString, SIM_NCCL_INVALID_USAGE),
                        "invalid usage (run with NCCL_DEBUG=WARN for details)");
}

static void a_communicator_ends_once(void **state) {
    rank_t ranks[1];
    (void)state;
    ASSERT_NCCL(CALL(ncclCommFinalize, NULL));
    ASSERT_NCCL(CALL(ncclCommDestroy, NULL));
    ASSERT_NCCL(CALL(ncclCommAbort, NULL));
    make_ranks(ranks, 1, 4);
    sim_nccl_handle_t comm = ranks[0].comm;
    ASSERT_NCCL(CALL(ncclCommFinalize, comm));
    assert_int_equal(CALL(ncclCommFinalize, comm), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommSplit, comm, 0, 0, &ranks[0].comm, NULL), SIM_NCCL_INVALID_USAGE);
    ASSERT_NCCL(CALL(ncclCommDestroy, comm));
    assert_int_equal(CALL(ncclCommFinalize, comm), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommDestroy, comm), SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclCommAbort, comm), SIM_NCCL_INVALID_ARGUMENT);
    drop_ranks(ranks, 1);
}

/* A rank that ends before the others are there. */
static int join_and_die(void) {
    sim_nccl_handle_t comm = NULL;
    sim_nccl_id_t id;
    const char *text = getenv("ID");
    for (size_t i = 0; i < sizeof id; i++) sscanf(text + 2 * i, "%2hhx", (unsigned char *)&id.bytes[i]);
    if (CALL(cudaSetDevice, 1) != CUDA_SUCCESS) return 1;
    _exit(CALL(ncclCommInitRankConfig, &comm, 3, id, 1, &not_blocking) == SIM_NCCL_IN_PROGRESS ? 0 : 2);
}

static void a_rank_that_dies_before_the_others_are_there(void **state) {
    static char variable[2 * sizeof(sim_nccl_id_t) + 4] = "ID=";
    const char *const variables[] = {variable, "TMS_SIMULATED_DEVICES=2", NULL};
    char output[1024];
    sim_nccl_handle_t comm = NULL;
    sim_nccl_result_t error = SIM_NCCL_IN_PROGRESS;
    sim_nccl_id_t id;
    (void)state;
    ASSERT_NCCL(CALL(ncclGetUniqueId, &id));
    assert_int_equal(CALL(ncclCommInitRankConfig, &comm, 3, id, 0, &not_blocking), SIM_NCCL_IN_PROGRESS);
    for (size_t i = 0; i < sizeof id; i++) sprintf(variable + 3 + 2 * i, "%02x", (unsigned char)id.bytes[i]);
    assert_int_equal(run_again("join_and_die", variables, output, sizeof output), 0);
    assert_string_equal(output, "");
    while (error == SIM_NCCL_IN_PROGRESS) ASSERT_NCCL(CALL(ncclCommGetAsyncError, comm, &error));
    assert_int_equal(error, SIM_NCCL_REMOTE);
    assert_non_null(strstr(CALL(ncclGetLastError, NULL), "rank 1 left before all ranks had joined"));
    ASSERT_NCCL(CALL(ncclCommAbort, comm));
}

/* A forked child is refused at once. */
static void a_forked_child_is_refused(void **state) {
    rank_t ranks[1];
    sim_nccl_id_t id;
    sim_nccl_result_t error = SIM_NCCL_SUCCESS;
    int status = 0;
    (void)state;
    make_ranks(ranks, 1, 4);
    pid_t child = fork();
    if (child == 0) {
        bool refused =
            CALL(ncclGetUniqueId, &id) == SIM_NCCL_UNHANDLED_CUDA &&
            CALL(ncclAllReduce, ranks[0].source, ranks[0].source, 1, 0, 0, ranks[0].comm, NULL) == SIM_NCCL_UNHANDLED_CUDA &&
            CALL(ncclCommGetAsyncError, ranks[0].comm, &error) == SIM_NCCL_UNHANDLED_CUDA &&
            CALL(ncclCommAbort, ranks[0].comm) == SIM_NCCL_UNHANDLED_CUDA &&
            strstr(CALL(ncclGetLastError, NULL), "was forked");
        _exit(refused ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    drop_ranks(ranks, 1);
}

int main(int count, char **arguments) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_more_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TEST(a_communicator_is_split),
        TEST(shrinking_leaves_ranks_out),
        TEST(calls_that_do_not_block),
        TEST(a_communicator_that_is_not_ready_is_aborted),
        TEST(mismatched_arguments_are_refused),
        TEST(a_communicator_ends_once),
        TEST(a_rank_that_dies_before_the_others_are_there),
        TEST(a_forked_child_is_refused),
    };
    if (count > 1 && strcmp(arguments[1], "join_and_die") == 0) return join_and_die();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
