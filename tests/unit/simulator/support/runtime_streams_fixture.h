/* Shared by the tests of streams and graphs of the simulated GPU's runtime. */
#ifndef TMS_TESTS_RUNTIME_STREAMS_FIXTURE_H
#define TMS_TESTS_RUNTIME_STREAMS_FIXTURE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated_cuda.h"

enum { DEVICE_TO_DEVICE = 3, NON_BLOCKING = 1, BLOCKING_SYNC = 1, DISABLE_TIMING = 2, INTERPROCESS = 4, EXTERNAL = 1 };

static CUstream make_stream(void) {
    CUstream stream = NULL;
    ASSERT_CUDA(CALL(cudaStreamCreateWithFlags, &stream, NON_BLOCKING));
    return stream;
}

static CUevent make_event(unsigned flags) {
    CUevent event = NULL;
    ASSERT_CUDA(CALL(cudaEventCreateWithFlags, &event, flags));
    return event;
}

static uint8_t *allocate(size_t bytes) {
    void *memory = NULL;
    ASSERT_CUDA(CALL(cudaMalloc, &memory, bytes));
    return memory;
}

/* What the program's functions saw. */
typedef struct seen {
    const uint8_t *memory;
    uint8_t byte;
    int calls;
    CUresult result, status;
    CUstream stream;
} seen_t;

static void look(void *argument) {
    seen_t *seen = argument;
    size_t available = 0, total = 0;
    seen->byte = *seen->memory;
    seen->calls++;
    seen->result = CALL(cudaMemGetInfo, &available, &total);
}

static void look_as_callback(CUstream stream, CUresult status, void *argument) {
    seen_t *seen = argument;
    seen->stream = stream;
    seen->status = status;
    look(argument);
}

#endif
