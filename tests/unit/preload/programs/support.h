/* Shared by the test programs. Each is a small program of many scenarios; the first argument names the one to run. It is
 * linked with a CUDA runtime (the simulated GPU under the runtime's name) like any CUDA program. Of the preload library it
 * knows only the names of tms.h, which it looks up as programs do through ctypes. Exit status 0: every check held. */
#ifndef PRELOAD_TEST_SUPPORT_H
#define PRELOAD_TEST_SUPPORT_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/tms.h"
#include "simulator/simulator.h"

#define MIB ((size_t)1 << 20)

/* The part of the runtime that the programs use; its header is not needed. */
int cudaGetDevice(int *device);
int cudaSetDevice(int device);
int cudaDeviceEnablePeerAccess(int peer, unsigned int flags);
int cudaIpcGetMemHandle(void *handle, void *address);
int cudaMalloc(void **address, size_t bytes);
int cudaFree(void *address);
int cudaMemset(void *address, int value, size_t bytes);
int cudaMemcpy(void *destination, const void *source, size_t bytes, int kind);
int cudaDeviceSynchronize(void);
int cudaStreamCreateWithFlags(void **stream, unsigned int flags);
int cudaStreamDestroy(void *stream);
int cudaStreamBeginCapture(void *stream, int mode);
int cudaStreamBeginCapture_ptsz(void *stream, int mode);
int cudaStreamBeginCaptureToGraph(void *stream, void *graph, const void *dependencies, const void *edges, size_t count,
                                  int mode);
int cudaStreamBeginCaptureToGraph_ptsz(void *stream, void *graph, const void *dependencies, const void *edges, size_t count,
                                       int mode);
int cudaStreamEndCapture(void *stream, void **graph);
int cudaStreamEndCapture_ptsz(void *stream, void **graph);
int cudaGraphCreate(void **graph, unsigned int flags);
int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags);
int cudaGraphLaunch(void *executable, void *stream);

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    MEMORY_ALLOCATION = 2,
    INITIALIZATION = 3,
    NO_DEVICE = 100,
    CAPTURE_UNSUPPORTED = 900,
    STREAM_NON_BLOCKING = 1,
    CAPTURE_MODE_RELAXED = 2,
    COPY_DEFAULT = 4
};

/* A function of the preload library. The program ends with status 2 if the library is not loaded. */
static inline void *find_function(const char *name) {
    void *address = dlsym(RTLD_DEFAULT, name);
    if (address) return address;
    fprintf(stderr, "%s is not loaded\n", name);
    exit(2);
}
#define TMS(name) ((__typeof__(&name))find_function(#name))
#define API()     (TMS(tms_get_api)(TMS_INTERFACE))

#define CHECK(condition)                                                                                                    \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                 \
            exit(1);                                                                                                        \
        }                                                                                                                   \
    } while (0)

#define EQUAL(left, right)                                                                                                  \
    do {                                                                                                                    \
        long long left_value = (long long)(left), right_value = (long long)(right);                                         \
        if (left_value != right_value) {                                                                                    \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld (%s)\n", __FILE__, __LINE__, #left, left_value, right_value,       \
                    #right);                                                                                                \
            exit(1);                                                                                                        \
        }                                                                                                                   \
    } while (0)

static inline tms_sim_usage_t usage_of(int device) {
    tms_sim_usage_t usage;
    tms_sim_usage(device, &usage);
    return usage;
}

static inline tms_counters_t counters(void) {
    tms_counters_t values;
    API()->counters(&values);
    return values;
}

/* Device memory is host memory on the simulated GPU. */
static inline void fill(void *address, size_t bytes, unsigned seed) {
    for (size_t i = 0; i < bytes; i++) ((unsigned char *)address)[i] = (unsigned char)(i * 7 + i / 4096 + seed);
}

static inline bool is_filled(const void *address, size_t bytes, unsigned seed) {
    for (size_t i = 0; i < bytes; i++) {
        if (((const unsigned char *)address)[i] != (unsigned char)(i * 7 + i / 4096 + seed)) return false;
    }
    return true;
}

static inline bool is_poisoned(const void *address, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (((const unsigned char *)address)[i] != TMS_SIM_POISON) return false;
    }
    return true;
}

/* An allocation that must succeed and be managed, or ordinary. */
static inline void *allocate(size_t bytes) {
    void *address = NULL;
    EQUAL(cudaMalloc(&address, bytes), SUCCESS);
    CHECK(address != NULL);
    return address;
}

static inline bool is_managed(const void *address) {
    tms_segment_info_t row;
    return API()->find((uintptr_t)address, 1, &row) == TMS_OK;
}

static inline tms_segment_info_t segment_of(const void *address) {
    tms_segment_info_t row;
    EQUAL(API()->find((uintptr_t)address, 1, &row), TMS_OK);
    return row;
}

typedef struct scenario {
    const char *name;
    void (*run)(void);
} scenario_t;

/* Runs the scenario that the first argument names. */
static inline int run_scenario(const scenario_t *scenarios, size_t count, int argc, char **argv) {
    for (size_t i = 0; argc > 1 && i < count; i++) {
        if (strcmp(scenarios[i].name, argv[1]) != 0) continue;
        scenarios[i].run();
        printf("done\n");
        return 0;
    }
    fprintf(stderr, "no such scenario: %s\n", argc > 1 ? argv[1] : "(none)");
    return 2;
}

#define SCENARIO(name) {#name, name}
#define MAIN(...)                                                                                                           \
    int main(int argc, char **argv) {                                                                                       \
        const scenario_t scenarios[] = {__VA_ARGS__};                                                                       \
        return run_scenario(scenarios, sizeof(scenarios) / sizeof(*scenarios), argc, argv);                                 \
    }

#endif
