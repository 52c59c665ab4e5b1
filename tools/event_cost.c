/* How long an event of the ring (csrc/base/events.h) takes: on one thread, on two that record at once, and with the ring
 * off. Prints the median of some rounds. Built and run by `make event-cost`. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/events.h"

enum { CAPACITY = 4096, EVENTS = 200000, ROUNDS = 25, THREADS = 2 };

static double now(void) {
    const double nanoseconds = 1e9;
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * nanoseconds + (double)time.tv_nsec;
}

static void *record(void *argument) {
    tms_events_t *events = argument;
    for (int i = 0; i < EVENTS; i++)
        tms_events_record(events, (tms_event_t){.kind = TMS_EVENT_ALLOCATE, .bytes = (uint64_t)i, .tag = "weights"});
    return NULL;
}

static double round_with(tms_events_t *events, int threads) {
    pthread_t started[THREADS];
    double began = now();
    for (int i = 1; i < threads; i++) {
        if (pthread_create(&started[i], NULL, record, events) != 0) exit(EXIT_FAILURE);
    }
    record(events);
    for (int i = 1; i < threads; i++) pthread_join(started[i], NULL);
    return (now() - began) / EVENTS;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void measure(const char *what, size_t capacity, int threads) {
    double times[ROUNDS];
    tms_error_t error;
    tms_events_t events;
    if (tms_events_init(&events, capacity, &error) != TMS_OK) {
        fprintf(stderr, "%s\n", error.message);
        exit(EXIT_FAILURE);
    }
    for (int i = 0; i < ROUNDS; i++) times[i] = round_with(&events, threads);
    qsort(times, ROUNDS, sizeof *times, compare);
    printf("%-32s %8.1f ns an event of a thread\n", what, times[ROUNDS / 2]);
    tms_events_release(&events);
}

int main(void) {
    measure("one thread", CAPACITY, 1);
    measure("two threads at once", CAPACITY, THREADS);
    measure("off", 0, 1);
    return 0;
}
