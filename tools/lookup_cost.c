/* How long a look-up takes, and an allocation with its free by functions that were looked up. The driver is a stub whose
 * calls take no time. Prints the median of some rounds. `make lookup-cost` runs it without and with the ledger library. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CALLS = 100000, ROUNDS = 25 };

typedef int (*allocate_t)(uint64_t *address, size_t bytes);
typedef int (*free_t)(uint64_t address);

static void *driver;
static allocate_t allocate;
static free_t release;

static double now(void) {
    const double nanoseconds = 1e9;
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * nanoseconds + (double)time.tv_nsec;
}

static void look_up_next(void) {
    if (!dlsym(RTLD_NEXT, "malloc")) exit(EXIT_FAILURE);
}

static void look_up_in_driver(void) {
    if (!dlsym(driver, "cuCtxGetDevice")) exit(EXIT_FAILURE);
}

static void look_up_counted(void) {
    if (!dlsym(driver, "cuMemAlloc_v2")) exit(EXIT_FAILURE);
}

static void allocate_and_free(void) {
    uint64_t address = 0;
    if (allocate(&address, 1) || release(address)) exit(EXIT_FAILURE);
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void measure(const char *what, void (*call)(void)) {
    double times[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        double began = now();
        for (int j = 0; j < CALLS; j++) call();
        times[i] = (now() - began) / CALLS;
    }
    qsort(times, ROUNDS, sizeof *times, compare);
    printf("%-36s %8.1f ns\n", what, times[ROUNDS / 2]);
}

int main(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) return EXIT_FAILURE;
    allocate = (allocate_t)dlsym(driver, "cuMemAlloc_v2");
    release = (free_t)dlsym(driver, "cuMemFree_v2");
    measure("dlsym(RTLD_NEXT, \"malloc\")", look_up_next);
    measure("dlsym of the driver, not counted", look_up_in_driver);
    measure("dlsym of the driver, counted", look_up_counted);
    measure("an allocation and its free", allocate_and_free);
    return 0;
}
