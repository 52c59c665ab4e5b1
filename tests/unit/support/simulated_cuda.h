/* Shared by the tests of the simulated GPU itself: its entry points by name, and short forms of frequent calls.
 *
 * TMS_CUDA_DRIVER names the library; without it a program fails, and does not skip. */
#ifndef TMS_TEST_SIMULATED_CUDA_H
#define TMS_TEST_SIMULATED_CUDA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> /* needs all of the above */

#include "simulator/control/all_entries.h"
#include "simulator/simulator.h"

#define MIB           ((uint64_t)1 << 20)
#define GRANULE       ((uint64_t)TMS_SIM_GRANULARITY)
#define DEVICE_MEMORY (64 * MIB)

enum { NO_GATE = 0 }; /* A kernel or an operator with this gate does not wait. */

/* The control functions used here; the types are those of simulator.h. */
#define SIMULATED_CONTROLS(X)                                                                                               \
    X(reset)                                                                                                                \
    X(set_bandwidth)                                                                                                        \
    X(set_peer_capable)                                                                                                     \
    X(set_poison_limit)                                                                                                     \
    X(deinitialize)                                                                                                         \
    X(fail_after)                                                                                                           \
    X(failures_fired)                                                                                                       \
    X(calls)                                                                                                                \
    X(clear_counts)                                                                                                         \
    X(calls_in_child)                                                                                                       \
    X(trace)                                                                                                                \
    X(read_trace)                                                                                                           \
    X(usage)                                                                                                                \
    X(take_memory)                                                                                                          \
    X(launch_add)                                                                                                           \
    X(attach_device_process)                                                                                                \
    X(set_manager)                                                                                                          \
    X(run_operator)                                                                                                         \
    X(ask_operator)                                                                                                         \
    X(free_answer)                                                                                                          \
    X(blas_workspace)                                                                                                       \
    X(begin_draw)                                                                                                           \
    X(end_draw)                                                                                                             \
    X(open_gate)                                                                                                            \
    X(wait_until_synchronizing)                                                                                             \
    X(fingerprint)                                                                                                          \
    X(lose_device)                                                                                                          \
    X(recover)

typedef struct simulated {
#define SIMULATED_ENTRY(symbol, implementation, checks, parameters, arguments) CUresult(*symbol) parameters;
    SIM_DRIVER_ENTRIES(SIMULATED_ENTRY)
    SIM_RUNTIME_ENTRIES(SIMULATED_ENTRY)
#undef SIMULATED_ENTRY
#define SIMULATED_ENTRY(symbol, implementation, checks, parameters, arguments) sim_nccl_result_t(*symbol) parameters;
    SIM_NCCL_ENTRIES(SIMULATED_ENTRY)
#undef SIMULATED_ENTRY
#define SIMULATED_CONTROL(name) __typeof__(tms_sim_##name) *name;
    SIMULATED_CONTROLS(SIMULATED_CONTROL)
#undef SIMULATED_CONTROL
    CUresult (*cudaGetLastError)(void);
    CUresult (*cudaPeekAtLastError)(void);
    const char *(*cudaGetErrorName)(CUresult error);
    const char *(*cudaGetErrorString)(CUresult error);
    const char *(*ncclGetErrorString)(sim_nccl_result_t result);
    const char *(*ncclGetLastError)(sim_nccl_handle_t comm);
    int (*cublasCreate_v2)(void **handle);
    int (*cublasDestroy_v2)(void *handle);
    int (*cublasSetStream_v2)(void *handle, void *stream);
    int (*cublasSetWorkspace_v2)(void *handle, void *workspace, size_t bytes);
    int (*cublasSetMathMode)(void *handle, int mode);
} simulated_t;

/* Loaded at the first call. */
const simulated_t *simulated(void);

/* Calls an entry point or control function: CALL(cuMemUnmap, address, bytes). */
#define CALL(name, ...)           (simulated()->name(__VA_ARGS__))
#define ASSERT_RESULT(code, call) assert_int_equal((call), (code))
#define ASSERT_CUDA(call)         assert_int_equal((call), CUDA_SUCCESS)

/* cmocka setups: a fresh simulator with one, two devices of DEVICE_MEMORY, cuInit done, and device 0's primary context
 * current. */
int setup_one_gpu(void **state);
int setup_two_gpus(void **state);
/* Fails if the test left anything allocated. */
int teardown_gpus(void **state);

CUmemAllocationProp pinned_on(int device);
CUmemAccessDesc access_for(int device, CUmemAccess_flags flags);
CUcontext retain_primary(int device);

/* A reservation, mapped with fresh memory of a device, accessible to that device; and its undo. */
typedef struct block {
    CUdeviceptr address;
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
} block_t;
block_t make_block(int device, uint64_t bytes);
void unmap_block(const block_t *block); /* unmap and release: the address stays */
void drop_block(const block_t *block);

/* Whether all bytes are `value`. */
void assert_bytes(CUdeviceptr address, uint64_t bytes, uint8_t value);
tms_sim_usage_t usage_of(int device);

/* Runs this program again with one argument in a fresh process, with its stderr in `output` ("" if nothing), and returns
 * its exit status. `variables` are NAME=value, NULL at the end. */
int run_again(const char *role, const char *const *variables, char *output, size_t capacity);

#endif
