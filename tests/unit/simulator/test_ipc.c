/* Guards the simulated GPU's handles for other processes: memory and events, with this program started again as the other
 * one. */
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support/processes_fixture.h"

enum { LAZY_PEER_ACCESS = 1, DISABLE_TIMING = 2, INTERPROCESS = 4 };
enum { ROUNDS = 50 };
enum { HEX_BYTES = 2 * CU_IPC_HANDLE_SIZE + 32, OFFSET = 3, ALLOCATED = TMS_SIM_GRANULARITY - 100 };

/* NAME=handle in hexadecimal digits, and back. */
static void write_handle(char *text, const char *name, const void *handle) {
    const uint8_t *bytes = handle;
    int at = sprintf(text, "%s=", name);
    for (int i = 0; i < CU_IPC_HANDLE_SIZE; i++) at += sprintf(text + at, "%02x", bytes[i]);
}

static void read_handle(const char *name, void *handle) {
    const char *text = getenv(name);
    for (int i = 0; text && i < CU_IPC_HANDLE_SIZE; i++) {
        const char digits[] = {text[2 * i], text[2 * i + 1], '\0'};
        ((uint8_t *)handle)[i] = (uint8_t)strtoul(digits, NULL, 16);
    }
}

#define CHECK(condition)                                                                                                    \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                                         \
            return CHILD_FAILED;                                                                                            \
        }                                                                                                                   \
    } while (0)

static int count_files(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder)) count++;
    if (folder) closedir(folder);
    return count;
}

/* The other process: finds the bytes, writes its own, and uses the memory like any other. */
static int open_memory(void) {
    CUipcMemHandle handle;
    void *memory = NULL, *again = NULL;
    uint8_t bytes[8];
    tms_sim_usage_t usage;
    sim_pointer_attributes_t attributes;
    int files = count_files();
    read_handle("MEMORY", &handle);
    CHECK(CALL(cudaIpcOpenMemHandle, &memory, handle, LAZY_PEER_ACCESS) == CUDA_SUCCESS);
    CHECK(CALL(cudaIpcOpenMemHandle, &again, handle, LAZY_PEER_ACCESS) == CUDA_SUCCESS);
    CHECK(again == memory);
    CALL(usage, 0, &usage);
    CHECK(usage.physical_bytes == 0 && usage.runtime_allocations == 0); /* its owner is charged */
    CHECK(CALL(cudaMemcpy, bytes, memory, sizeof bytes, 2) == CUDA_SUCCESS);
    for (size_t i = 0; i < sizeof bytes; i++) CHECK(bytes[i] == 11);
    CHECK(CALL(cudaMemset, (char *)memory + OFFSET, 22, 2) == CUDA_SUCCESS);
    CHECK(CALL(cudaDeviceSynchronize) == CUDA_SUCCESS);
    CHECK(CALL(cudaPointerGetAttributes, &attributes, memory) == CUDA_SUCCESS && attributes.type == 2);
    CHECK(CALL(cudaIpcGetMemHandle, &handle, memory) == CUDA_ERROR_INVALID_VALUE); /* not its own */
    CHECK(CALL(cudaFree, memory) == CUDA_ERROR_INVALID_VALUE);
    CHECK(CALL(cudaMemset, memory, 1, ALLOCATED + 1) == CUDA_ERROR_INVALID_VALUE); /* no more than the owner requested */
    CHECK(CALL(cudaIpcCloseMemHandle, memory) == CUDA_SUCCESS);
    CHECK(*(uint8_t *)memory == 11); /* it was opened twice */
    CHECK(CALL(cudaIpcCloseMemHandle, memory) == CUDA_SUCCESS);
    CHECK(CALL(cudaIpcCloseMemHandle, memory) == CUDA_ERROR_INVALID_VALUE);
    CHECK(CALL(cudaMemset, memory, 1, 1) == CUDA_ERROR_INVALID_VALUE);
    CHECK(count_files() == files);
    memset(&handle, 0, sizeof handle);
    CHECK(CALL(cudaIpcOpenMemHandle, &memory, handle, LAZY_PEER_ACCESS) == CUDA_ERROR_INVALID_VALUE);
    return 0;
}

static void another_process_opens_memory(void **state) {
    static char variable[HEX_BYTES];
    const char *const variables[] = {variable, NULL};
    char output[OUTPUT_BYTES];
    uint8_t *before = NULL, *memory = NULL;
    CUipcMemHandle handle;
    (void)state;
    ASSERT_CUDA(CALL(cudaMalloc, (void **)&before, GRANULE)); /* so that the other does not start at offset 0 of the file */
    ASSERT_CUDA(CALL(cudaMalloc, (void **)&memory, ALLOCATED));
    ASSERT_CUDA(CALL(cudaMemset, memory, 11, ALLOCATED));
    ASSERT_CUDA(CALL(cudaDeviceSynchronize));
    ASSERT_CUDA(CALL(cudaIpcGetMemHandle, &handle, memory));
    write_handle(variable, "MEMORY", &handle);
    int status = run_again("open_memory", variables, output, sizeof output);
    assert_string_equal(output, "");
    assert_int_equal(status, 0);
    assert_bytes((uintptr_t)memory, OFFSET, 11);
    assert_bytes((uintptr_t)memory + OFFSET, 2, 22);
    assert_bytes((uintptr_t)before, GRANULE, TMS_SIM_POISON);
    ASSERT_CUDA(CALL(cudaFree, memory));
    ASSERT_CUDA(CALL(cudaFree, before));
}

static void only_allocations_can_be_opened_elsewhere(void **state) {
    block_t block = make_block(0, GRANULE);
    void *memory = NULL, *opened = NULL;
    CUipcMemHandle handle;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaIpcGetMemHandle, &handle, (void *)(uintptr_t)block.address));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaIpcGetMemHandle, &handle, &handle));
    ASSERT_CUDA(CALL(cudaMalloc, &memory, 1));
    ASSERT_CUDA(CALL(cudaIpcGetMemHandle, &handle, memory));
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cudaIpcOpenMemHandle, &opened, handle, LAZY_PEER_ACCESS));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaIpcCloseMemHandle, memory));
    ASSERT_CUDA(CALL(cudaFree, memory));
    drop_block(&block);
}

/* The other process: the owner's record is not reached until this process has reported that it saw that. */
static int open_event(void) {
    CUipcEventHandle handle;
    CUipcMemHandle memory_handle;
    CUevent event = NULL;
    CUstream stream = NULL, busy = NULL;
    void *memory = NULL;
    int pipe_end = atoi(getenv("PIPE"));
    read_handle("EVENT", &handle);
    read_handle("MEMORY", &memory_handle);
    CHECK(CALL(cudaIpcOpenMemHandle, &memory, memory_handle, LAZY_PEER_ACCESS) == CUDA_SUCCESS);
    CHECK(CALL(cudaIpcOpenEventHandle, &event, handle) == CUDA_SUCCESS);
    CHECK(CALL(cudaStreamCreate, &stream) == CUDA_SUCCESS);
    CHECK(CALL(cudaEventQuery, event) == CUDA_ERROR_NOT_READY);
    CHECK(CALL(cudaStreamWaitEvent, stream, event, 0) == CUDA_SUCCESS);
    CHECK(CALL(cudaMemsetAsync, memory, 100, 1, stream) == CUDA_SUCCESS);
    CHECK(CALL(cudaStreamCreateWithFlags, &busy, 1) == CUDA_SUCCESS);
    for (int i = 0; i < ROUNDS; i++) { /* time in which that fill could run if it did not wait */
        CHECK(CALL(cudaMemsetAsync, (char *)memory + 1, i, 1, busy) == CUDA_SUCCESS);
        CHECK(CALL(cudaStreamSynchronize, busy) == CUDA_SUCCESS);
    }
    CHECK(CALL(cudaStreamDestroy, busy) == CUDA_SUCCESS);
    CHECK(*(uint8_t *)memory == 0); /* neither that nor the owner's work has run */
    CHECK(write(pipe_end, "x", 1) == 1);
    CHECK(CALL(cudaEventSynchronize, event) == CUDA_SUCCESS);
    CHECK(CALL(cudaStreamSynchronize, stream) == CUDA_SUCCESS);
    CHECK(*(uint8_t *)memory == 100);
    CHECK(CALL(cudaEventRecord, event, stream) == CUDA_SUCCESS);
    CHECK(CALL(cudaIpcGetEventHandle, &handle, event) == CUDA_ERROR_INVALID_VALUE); /* not its own */
    CHECK(CALL(cudaEventDestroy, event) == CUDA_SUCCESS);
    CHECK(CALL(cudaIpcCloseMemHandle, memory) == CUDA_SUCCESS);
    return CALL(cudaStreamDestroy, stream);
}

static void *open_gate_when_told(void *argument) {
    char byte = 0;
    if (read(*(const int *)argument, &byte, 1) == 1) CALL(open_gate, 1);
    return NULL;
}

static void another_process_waits_for_an_event(void **state) {
    static char memory_variable[HEX_BYTES], event_variable[HEX_BYTES], pipe_variable[32];
    const char *const variables[] = {memory_variable, event_variable, pipe_variable, NULL};
    char output[OUTPUT_BYTES];
    CUipcMemHandle memory_handle;
    CUipcEventHandle handle;
    CUevent event = NULL, ordinary = NULL, opened = NULL;
    CUstream stream = NULL;
    void *memory = NULL;
    pthread_t thread;
    int ends[2];
    (void)state;
    ASSERT_CUDA(CALL(cudaMalloc, &memory, 2));
    ASSERT_CUDA(CALL(cudaMemset, memory, 0, 2));
    ASSERT_CUDA(CALL(cudaDeviceSynchronize));
    ASSERT_CUDA(CALL(cudaStreamCreate, &stream));
    ASSERT_CUDA(CALL(cudaEventCreate, &ordinary));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cudaIpcGetEventHandle, &handle, ordinary));
    ASSERT_CUDA(CALL(cudaEventCreateWithFlags, &event, INTERPROCESS | DISABLE_TIMING));
    ASSERT_CUDA(CALL(launch_add, stream, (uintptr_t)memory, 1, 1, 1));
    ASSERT_CUDA(CALL(cudaEventRecord, event, stream));
    ASSERT_CUDA(CALL(cudaIpcGetMemHandle, &memory_handle, memory));
    ASSERT_CUDA(CALL(cudaIpcGetEventHandle, &handle, event));
    ASSERT_RESULT(CUDA_ERROR_INVALID_CONTEXT, CALL(cudaIpcOpenEventHandle, &opened, handle));
    assert_int_equal(pipe(ends), 0);
    write_handle(memory_variable, "MEMORY", &memory_handle);
    write_handle(event_variable, "EVENT", &handle);
    snprintf(pipe_variable, sizeof pipe_variable, "PIPE=%d", ends[1]);
    assert_int_equal(pthread_create(&thread, NULL, open_gate_when_told, &ends[0]), 0);
    int status = run_again("open_event", variables, output, sizeof output);
    close(ends[1]); /* a child that failed early has not reported to the thread */
    assert_int_equal(pthread_join(thread, NULL), 0);
    close(ends[0]);
    assert_string_equal(output, "");
    assert_int_equal(status, 0);
    ASSERT_CUDA(CALL(cudaEventQuery, event)); /* which the other process recorded last */
    ASSERT_CUDA(CALL(cudaStreamWaitEvent, stream, event, 0));
    ASSERT_CUDA(CALL(cudaStreamSynchronize, stream));
    assert_int_equal(*(uint8_t *)memory, 100);
    ASSERT_CUDA(CALL(cudaEventDestroy, event));
    ASSERT_CUDA(CALL(cudaEventDestroy, ordinary));
    ASSERT_CUDA(CALL(cudaStreamDestroy, stream));
    ASSERT_CUDA(CALL(cudaFree, memory));
}

/* A process that records an event and dies is not waited for. */
static int record_and_die(void) {
    CUipcEventHandle handle;
    CUevent event = NULL;
    CUstream stream = NULL;
    void *memory = NULL;
    read_handle("EVENT", &handle);
    CHECK(CALL(cudaIpcOpenEventHandle, &event, handle) == CUDA_SUCCESS);
    CHECK(CALL(cudaStreamCreate, &stream) == CUDA_SUCCESS);
    CHECK(CALL(cudaMalloc, &memory, 1) == CUDA_SUCCESS);
    CHECK(CALL(launch_add, stream, (uintptr_t)memory, 1, 1, 7) == CUDA_SUCCESS); /* the gate stays shut */
    CHECK(CALL(cudaEventRecord, event, stream) == CUDA_SUCCESS);
    CHECK(CALL(cudaEventQuery, event) == CUDA_ERROR_NOT_READY);
    _exit(0);
}

static void a_dead_process_is_not_waited_for(void **state) {
    static char variable[HEX_BYTES];
    const char *const variables[] = {variable, NULL};
    char output[OUTPUT_BYTES];
    CUipcEventHandle handle;
    CUevent event = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cudaEventCreateWithFlags, &event, INTERPROCESS | DISABLE_TIMING));
    ASSERT_CUDA(CALL(cudaEventQuery, event)); /* never recorded */
    ASSERT_CUDA(CALL(cudaIpcGetEventHandle, &handle, event));
    write_handle(variable, "EVENT", &handle);
    assert_int_equal(run_again("record_and_die", variables, output, sizeof output), 0);
    assert_string_equal(output, "");
    ASSERT_CUDA(CALL(cudaEventQuery, event));
    ASSERT_CUDA(CALL(cudaEventSynchronize, event));
    ASSERT_CUDA(CALL(cudaEventDestroy, event));
}

int main(int count, char **arguments) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(another_process_opens_memory),
        ONE(only_allocations_can_be_opened_elsewhere),
        ONE(another_process_waits_for_an_event),
        ONE(a_dead_process_is_not_waited_for),
    };
    static const role_t roles[] = {
        {"open_memory", open_memory}, {"open_event", open_event}, {"record_and_die", record_and_die}};
    if (count > 1) return run_role(roles, sizeof roles / sizeof *roles, arguments[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
