/* How long an event of the ring (csrc/base/events.h) takes: on one thread, on two that record at once, and with the ring
 * off; and what NVTX ranges (csrc/base/nvtx.h) cost where no tool is attached. Prints the median of some rounds. Built and
 * run by `make event-cost`. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/events.h"
#include "base/nvtx.h"

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

/* As observers.c and observers.h do it: a call asks for the tool once, and each of its ranges tests the answer. */
static double round_of_calls(tms_nvtx_t *nvtx) {
    double began = now();
    for (int i = 0; i < EVENTS; i++) {
        tms_nvtx_t *volatile attached = tms_nvtx_attach(nvtx);
        if (attached) tms_nvtx_push_call(attached, "pause", NULL, 0);
    }
    return (now() - began) / EVENTS;
}

static double round_of_ranges(tms_nvtx_t *nvtx) {
    tms_nvtx_t *volatile attached = tms_nvtx_attach(nvtx);
    double began = now();
    for (int i = 0; i < EVENTS; i++) {
        if (attached) tms_nvtx_push(attached, TMS_PHASE_MAP, 1);
        if (attached) tms_nvtx_pop(attached);
    }
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

static void measure_nvtx(const char *what, double (*round)(tms_nvtx_t *nvtx)) {
    double times[ROUNDS];
    tms_nvtx_t nvtx = {.asked = false};
    for (int i = 0; i < ROUNDS; i++) times[i] = round(&nvtx);
    qsort(times, ROUNDS, sizeof *times, compare);
    printf("%-32s %8.1f ns [%.1f, %.1f]\n", what, times[ROUNDS / 2], times[0], times[ROUNDS - 1]);
}

int main(void) {
    measure("one thread", CAPACITY, 1);
    measure("two threads at once", CAPACITY, THREADS);
    measure("off", 0, 1);
    measure_nvtx("NVTX, no tool: a call", round_of_calls);
    measure_nvtx("NVTX, no tool: a range", round_of_ranges);
    return 0;
}
