/* How long it takes to count an allocation, and its free (csrc/base/ledger.c): on one thread, on two at once, and with many
 * allocations alive. Prints the median of some rounds. Built and run by `make ledger-cost`. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/ledger.h"

enum { CALLS = 100000, ROUNDS = 25, THREADS = 2, MANY_ALIVE = 100000, ADDRESS_SHIFT = 21, THREAD_SHIFT = 48 };

typedef struct worker {
    tms_ledger_t *ledger;
    uint64_t number;
} worker_t;

static double now(void) {
    const double nanoseconds = 1e9;
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * nanoseconds + (double)time.tv_nsec;
}

static void *count(void *argument) {
    const worker_t *worker = argument;
    for (uint64_t i = 1; i <= CALLS; i++) {
        uint64_t address = worker->number << THREAD_SHIFT | i << ADDRESS_SHIFT;
        tms_ledger_add(worker->ledger, (const void *)(uintptr_t)count, 0, address, 1);
        tms_ledger_settle(worker->ledger, tms_ledger_take(worker->ledger, address), true);
    }
    return NULL;
}

static double round_with(tms_ledger_t *ledger, int threads) {
    pthread_t started[THREADS];
    worker_t workers[THREADS];
    double began = now();
    for (int i = 0; i < threads; i++) {
        workers[i] = (worker_t){ledger, (uint64_t)i + 1};
        if (i > 0 && pthread_create(&started[i], NULL, count, &workers[i]) != 0) exit(EXIT_FAILURE);
    }
    count(&workers[0]);
    for (int i = 1; i < threads; i++) pthread_join(started[i], NULL);
    return (now() - began) / CALLS;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void measure(const char *what, uint64_t alive, int threads) {
    double times[ROUNDS];
    tms_ledger_t ledger;
    tms_ledger_init(&ledger);
    for (uint64_t i = 1; i <= alive; i++) tms_ledger_add(&ledger, (const void *)(uintptr_t)count, 0, i << ADDRESS_SHIFT, 1);
    for (int i = 0; i < ROUNDS; i++) times[i] = round_with(&ledger, threads);
    qsort(times, ROUNDS, sizeof *times, compare);
    printf("%-32s %8.1f ns an allocation and its free\n", what, times[ROUNDS / 2]);
    tms_ledger_release(&ledger);
}

int main(void) {
    measure("one thread", 0, 1);
    measure("one thread, 100000 alive", MANY_ALIVE, 1);
    measure("two threads at once", 0, THREADS);
    return 0;
}
