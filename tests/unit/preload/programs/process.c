/* Scenarios of test_process.py: fork, exec, threads and the end of the process, with managed memory alive. */

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

static int wait_for(pid_t child) {
    int status = 0;
    EQUAL(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* A child frees its parent's allocation: the free has no effect, and nothing fails. */
static void fork_after_use(void) {
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    fill(address, 2 * MIB, 1);
    pid_t child = fork();
    if (child == 0) {
        void *other = NULL;
        EQUAL(cudaFree(address), SUCCESS);
        EQUAL(cudaFree(address), SUCCESS);
        TMS(tms_torch_free)(address, 2 * MIB, 0, NULL);
        EQUAL(TMS(tms_pause)(NULL), INITIALIZATION);
        CHECK(cudaMalloc(&other, 2 * MIB) != SUCCESS);
        CHECK(other == NULL);
        exit(0); /* with the handlers of the process */
    }
    EQUAL(wait_for(child), 0);
    CHECK(is_filled(address, 2 * MIB, 1));
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
}

/* Before the driver is loaded, a child is like any process. */
static void fork_before_use(void) {
    TMS(tms_set_interesting_region)(true);
    pid_t child = fork();
    if (child == 0) {
        void *address = allocate(2 * MIB);
        CHECK(is_managed(address));
        EQUAL(TMS(tms_pause)(NULL), SUCCESS);
        EQUAL(usage_of(0).physical_bytes, 0);
        EQUAL(cudaFree(address), SUCCESS);
        exit(0);
    }
    EQUAL(wait_for(child), 0);
}

/* Like a worker that starts another program; the second program inherits LD_PRELOAD. */
static void fork_and_exec(void) {
    TMS(tms_set_interesting_region)(true);
    void *address = allocate(2 * MIB);
    pid_t child = fork();
    if (child == 0) {
        execlp("sh", "sh", "-c", "exit 7", (char *)NULL);
        _exit(99);
    }
    EQUAL(wait_for(child), 7);
    EQUAL(cudaFree(address), SUCCESS);
}

/* Threads that allocate and free while the process exits: the handlers run concurrently. */
static atomic_int running;

static void *allocate_for_ever(void *argument) {
    (void)argument;
    TMS(tms_set_interesting_region)(true);
    for (;;) {
        void *address = NULL;
        if (cudaMalloc(&address, 2 * MIB) == SUCCESS) (void)cudaFree(address);
        atomic_fetch_add(&running, 1);
    }
    return NULL;
}

static void threads_during_exit(void) {
    enum { THREADS = 3, ROUNDS = 30 };
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        EQUAL(pthread_create(&thread, NULL, allocate_for_ever, NULL), 0);
        EQUAL(pthread_detach(thread), 0);
    }
    while (atomic_load(&running) < ROUNDS) sched_yield();
}

/* The driver has shut down when the last owners free their memory, as at the end of a Python process. */
static void *late_address, *late_torch_address;

static void free_late(void) {
    EQUAL(cudaFree(late_address), SUCCESS);
    TMS(tms_torch_free)(late_torch_address, 2 * MIB, 0, NULL);
    CHECK(TMS(tms_torch_malloc)(2 * MIB, 0, NULL) == NULL);
}

static void free_after_deinitialisation(void) {
    CHECK(atexit(free_late) == 0);
    TMS(tms_set_interesting_region)(true);
    late_address = allocate(2 * MIB);
    late_torch_address = TMS(tms_torch_malloc)(2 * MIB, 0, NULL);
    CHECK(late_torch_address != NULL);
    tms_sim_deinitialize();
}

/* Many threads concurrently, each with its own settings. */
static void *cycle(void *argument) {
    char tag[16];
    snprintf(tag, sizeof(tag), "thread %d", *(const int *)argument);
    TMS(tms_set_interesting_region)(true);
    TMS(tms_set_enable_cpu_backup)(true);
    TMS(tms_set_current_tag)(tag);
    for (unsigned i = 0; i < 10; i++) {
        void *address = allocate(MIB);
        fill(address, MIB, i);
        EQUAL(TMS(tms_pause)(tag), SUCCESS);
        EQUAL(segment_of(address).state, TMS_SEGMENT_PAUSED);
        EQUAL(TMS(tms_resume)(tag), SUCCESS);
        CHECK(is_filled(address, MIB, i));
        EQUAL(strcmp(segment_of(address).tag, tag), 0);
        EQUAL(cudaFree(address), SUCCESS);
    }
    return NULL;
}

static void threads(void) {
    enum { THREADS = 4 };
    pthread_t thread[THREADS];
    int number[THREADS];
    for (int i = 0; i < THREADS; i++) {
        number[i] = i;
        EQUAL(pthread_create(&thread[i], NULL, cycle, &number[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) EQUAL(pthread_join(thread[i], NULL), 0);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(usage_of(0).reservations, 0);
}

/* With the variables that manage and back up everything, the program calls only CUDA, and something else pauses it. */
static void everything_managed(void) {
    void *address = allocate(8 * MIB);
    fill(address, 8 * MIB, 1);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    CHECK(is_filled(address, 8 * MIB, 1));
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(usage_of(0).reservations, 0);
}

MAIN(SCENARIO(fork_after_use), SCENARIO(fork_before_use), SCENARIO(fork_and_exec), SCENARIO(threads_during_exit),
     SCENARIO(free_after_deinitialisation), SCENARIO(threads), SCENARIO(everything_managed))
