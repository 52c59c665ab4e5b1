/* Guards the simulated GPU's threads: their number, and that idle ones sleep. A program may have hundreds of streams, and a
 * thread that wakes for another's work would cost all of them. */
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include "simulated_cuda.h"

enum { GATE = 1, STREAMS = 64, WAITERS = 2, LOOKS = 2000, SWITCHES = 200, NAME_BYTES = 64, LINE_BYTES = 256 };

static unsigned count_threads(void) {
    unsigned count = 0;
    DIR *folder = opendir("/proc/self/task");
    assert_non_null(folder);
    for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

/* How often a thread of this process has gone to sleep. */
static unsigned long count_sleeps(pid_t thread) {
    char name[NAME_BYTES], line[LINE_BYTES];
    unsigned long count = 0;
    snprintf(name, sizeof name, "/proc/self/task/%d/status", (int)thread);
    FILE *file = fopen(name, "re");
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "voluntary_ctxt_switches: %lu", &count) == 1) break;
    }
    fclose(file);
    return count;
}

static void only_busy_streams_have_threads(void **state) {
    CUstream streams[STREAMS];
    block_t block = make_block(0, GRANULE);
    (void)state;
    ASSERT_CUDA(CALL(launch_add, NULL, block.address + 1, 1, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuStreamSynchronize, NULL)); /* a first thread, and the one that a sanitizer starts */
    unsigned before = count_threads();
    for (int i = 0; i < STREAMS; i++) ASSERT_CUDA(CALL(cuStreamCreate, &streams[i], CU_STREAM_NON_BLOCKING));
    assert_int_equal(usage_of(0).streams, STREAMS);
    assert_int_equal(count_threads(), before);
    for (int i = 0; i < STREAMS; i++) ASSERT_CUDA(CALL(cuStreamSynchronize, streams[i])); /* without work */
    assert_int_equal(count_threads(), before);
    ASSERT_CUDA(CALL(launch_add, streams[1], block.address, 1, 1, NO_GATE));
    ASSERT_CUDA(CALL(cuStreamSynchronize, streams[1]));
    assert_bytes(block.address, 1, TMS_SIM_POISON + 1);
    assert_int_equal(count_threads(), before + 1);
    for (int i = 0; i < STREAMS; i += 2) ASSERT_CUDA(CALL(cuStreamDestroy_v2, streams[i]));
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cuStreamQuery, streams[0]));
    assert_int_equal(usage_of(0).streams, STREAMS / 2);
    drop_block(&block);
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0)); /* the others end with the context */
    assert_int_equal(usage_of(0).streams, 0);
    retain_primary(0);
    ASSERT_RESULT(CUDA_ERROR_INVALID_HANDLE, CALL(cuStreamQuery, streams[3]));
}

typedef struct waiter {
    CUcontext context;
    CUresult result;
    pthread_t thread;
    _Atomic(pid_t) id;
} waiter_t;

static void *synchronize(void *argument) {
    waiter_t *waiter = argument;
    waiter->result = CALL(cuCtxPushCurrent_v2, waiter->context);
    atomic_store(&waiter->id, gettid());
    if (waiter->result == CUDA_SUCCESS) waiter->result = CALL(cuCtxSynchronize);
    return NULL;
}

/* A few sleeps while they begin to wait are normal. */
static void waiting_threads_do_not_wake_each_other(void **state) {
    waiter_t waiters[WAITERS] = {0};
    unsigned long before[WAITERS];
    block_t block = make_block(0, GRANULE);
    (void)state;
    ASSERT_CUDA(CALL(launch_add, NULL, block.address, GRANULE, 1, GATE));
    for (int i = 0; i < WAITERS; i++) {
        ASSERT_CUDA(CALL(cuCtxGetCurrent, &waiters[i].context));
        assert_int_equal(pthread_create(&waiters[i].thread, NULL, synchronize, &waiters[i]), 0);
    }
    for (int i = 0; i < WAITERS; i++) {
        while (!atomic_load(&waiters[i].id)) sched_yield();
    }
    CALL(wait_until_synchronizing);
    for (int i = 0; i < WAITERS; i++) before[i] = count_sleeps(waiters[i].id);
    for (int i = 0; i < LOOKS; i++) {
        (void)usage_of(0);
        sched_yield();
        (void)count_sleeps(waiters[0].id);
    }
    for (int i = 0; i < WAITERS; i++) assert_in_range(count_sleeps(waiters[i].id), before[i], before[i] + SWITCHES);
    CALL(open_gate, GATE);
    for (int i = 0; i < WAITERS; i++) {
        assert_int_equal(pthread_join(waiters[i].thread, NULL), 0);
        ASSERT_CUDA(waiters[i].result);
    }
    assert_bytes(block.address, GRANULE, TMS_SIM_POISON + 1);
    drop_block(&block);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(only_busy_streams_have_threads, setup_one_gpu, teardown_gpus),
        cmocka_unit_test_setup_teardown(waiting_threads_do_not_wake_each_other, setup_one_gpu, teardown_gpus),
    };
    return cmocka_run_group_tests_name("simulated threads", tests, NULL, NULL);
}
