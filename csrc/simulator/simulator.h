/* The simulated GPU: a CUDA driver and the part of the runtime that we and our demo need, on host memory with real bytes.
 *
 * The library (_simulated_cuda.so) exports the driver's cu* functions under the names and versions of the real libcuda, the
 * runtime's cuda* functions, NCCL's nccl* functions, and the control functions below. It is configured by TMS_SIMULATED_*
 * variables when it is first used, or by these functions in the process. One mutex guards its whole state; streams are
 * served by one worker thread each. Not linked with the core: a test that wants it points TMS_CUDA_DRIVER at it. Loading it
 * does nothing.
 *
 * Memory is real: a reservation is mmap(PROT_NONE), physical memory a piece of its device's memfd, charged to the device's
 * budget and filled with a poison byte, a map MAP_FIXED|MAP_SHARED without access, set-access an mprotect, an unmap
 * PROT_NONE again. Device pointers are host addresses, so tests look at bytes directly.
 *
 * Where it is stricter or simpler than the real driver:
 *   - cudaMalloc and cuMemAlloc charge whole multiples of the granularity.
 *   - A call that needs a current context fails with the context's sticky error; calls of the virtual memory management,
 *     which need no context, go on working.
 *   - An asynchronous copy from or to pageable host memory returns when it is complete.
 *   - cuMemFreeHost and cuMemHostUnregister wait for all work of the context in which the memory was pinned, as the real
 *     ones do, and also for copies of other devices that use it. Meanwhile other threads can launch kernels, which the real
 *     driver has wait. cuMemFree waits for the whole context. cuMemUnmap waits for nothing but the chunk of at most 1 MiB
 *     that is being touched.
 *   - A forked child of a process that has used it gets CUDA_ERROR_NOT_INITIALIZED from every call but those that look at
 *     nothing of the device: versions, names of errors, cudaGetDeviceCount, cuThreadExchangeStreamCaptureMode.
 *   - Exported memory is charged to the process that made it, as long as that lives, whichever process holds it.
 * What else differs is listed, with reasons, in tests/conformance/driver/known_differences.json. */
#ifndef TMS_SIMULATOR_H
#define TMS_SIMULATOR_H

#include <stddef.h>
#include <stdint.h>

#define TMS_SIM_EXPORT __attribute__((visibility("default")))

enum { TMS_SIM_MAX_DEVICES = 8, TMS_SIM_GRANULARITY = 2 << 20, TMS_SIM_POISON = 0xA5, TMS_SIM_DRIVER_VERSION = 13000 };

/* Environment, read at the first call:
 *   TMS_SIMULATED_DEVICES      number of devices, default 1 (0: cuInit gives CUDA_ERROR_NO_DEVICE)
 *   TMS_SIMULATED_VISIBLE      1: CUDA_VISIBLE_DEVICES chooses among them, with the meaning that it has for the real driver;
 *                              default 0, because it may be about the real devices of the machine
 *   TMS_SIMULATED_MEMORY       bytes a device, with suffix KiB, MiB or GiB; default 8GiB
 *   TMS_SIMULATED_BANDWIDTH    bytes a second of copies in flight on a stream, 0 (default): as fast as memcpy
 *   TMS_SIMULATED_PEERS        0: no device can reach another; default 1
 *   TMS_SIMULATED_POISON       allocations up to this size (default 8MiB) are poisoned entirely when created, larger ones
 *                              in their first and last MiB only (the rest is zero, or poison where freed memory is
 *                              used again), so that large tests stay fast
 *   TMS_SIMULATED_KERNELS      error (default): launching a kernel that is not interpreted fails with cudaErrorNotSupported;
 *                              skip: it is counted and passed over. Either way stderr names each such kernel once. cpu: as
 *                              error, and PyTorch's operators launch none, because the device process does them
 *   TMS_SIMULATED_NCCL_MEMORY  bytes of its device that a rank of an NCCL communicator holds, with suffix; default 16MiB
 *   TMS_SIMULATED_SHARED       a name: processes with the same name share the budgets (POSIX shared memory)
 *   TMS_SIMULATED_TRACE        a path: every call is appended there, one line each
 *   TMS_SIMULATED_REPORT       1: at exit, what leaked is printed to stderr
 *   TMS_SIMULATED_FAULT        "call:succeed:fail:code[,call:...]", the same as tms_sim_fail_after */

/* Back to the state after loading, with this many devices and this much memory each. Everything allocated is gone; no thread
 * may be in the simulator. `devices` 0 is a machine with a driver and no GPU. Of the environment only TMS_SIMULATED_TRACE,
 * TMS_SIMULATED_REPORT, TMS_SIMULATED_SHARED (whose first process set the budgets) and TMS_SIMULATED_POISON stay in force.
 */
TMS_SIM_EXPORT void tms_sim_reset(int devices, uint64_t memory_bytes);
TMS_SIM_EXPORT void tms_sim_set_bandwidth(uint64_t bytes_per_second);
/* Whether devices can reach each other's memory (cuDeviceCanAccessPeer). They can, unless told otherwise. */
TMS_SIM_EXPORT void tms_sim_set_peer_capable(int can);
/* Allocations up to this size are poisoned entirely: see TMS_SIMULATED_POISON. */
TMS_SIM_EXPORT void tms_sim_set_poison_limit(uint64_t bytes);
/* From now on every call fails with CUDA_ERROR_DEINITIALIZED, as while the process exits; until tms_sim_reset. */
TMS_SIM_EXPORT void tms_sim_deinitialize(void);

/* Lets the driver or runtime function `call` succeed `succeed` more times, then fail `fail` times with `code`, without
 * effect, then succeed again. Names are those of the documentation, with or without the ABI suffix ("cuMemGetInfo" and
 * "cuMemGetInfo_v2" are the same). `call` "*" means every driver call that can touch the device: not cuGetErrorName,
 * cuGetErrorString, cuDriverGetVersion and cuGetProcAddress. One rule a name; a new one replaces it; `fail` 0 removes it.
 * Returns 0, or 1 if there is no such function. */
TMS_SIM_EXPORT int tms_sim_fail_after(const char *call, uint64_t succeed, uint64_t fail, int code);
TMS_SIM_EXPORT uint64_t tms_sim_failures_fired(void); /* since reset */

/* Calls made since reset (or since tms_sim_clear_counts): of one function, or of all for "*". The program's calls: what a
 * runtime function does inside is not counted again. */
TMS_SIM_EXPORT uint64_t tms_sim_calls(const char *call);
TMS_SIM_EXPORT void tms_sim_clear_counts(void); /* and the trace */

/* The trace: names of the calls in order, separated by '\n', from the first after clear. Writes at most `capacity`
 * bytes, NUL included, and returns the length of the whole. Recorded only after tms_sim_trace(1). */
TMS_SIM_EXPORT void tms_sim_trace(int on);
TMS_SIM_EXPORT size_t tms_sim_read_trace(char *text, size_t capacity);

/* What is allocated now, by this process. */
typedef struct tms_sim_usage {
    uint64_t physical_bytes;      /* charged to the device's budget, cudaMalloc included, tms_sim_take_memory not */
    uint64_t handles;             /* physical allocations of cuMemCreate alive, also released ones that are still mapped */
    uint64_t mappings;            /* of handles of this device */
    uint64_t reservations;        /* of the whole process */
    uint64_t host_bytes;          /* pinned host memory of the whole process, allocated and registered */
    uint64_t streams;             /* alive, of the device, the legacy stream not among them */
    uint64_t runtime_allocations; /* cudaMalloc / cuMemAlloc alive */
} tms_sim_usage_t;
TMS_SIM_EXPORT void tms_sim_usage(int device, tms_sim_usage_t *usage);
TMS_SIM_EXPORT uint64_t tms_sim_events(void); /* alive, of the whole process */
/* References to the device's primary context: retains less releases, of a runtime that uses it one more. */
TMS_SIM_EXPORT uint64_t tms_sim_context_references(int device);

/* Memory taken by "another process": charged to the device's budget, in no allocation. Negative gives back. 0 on success,
 * else 2. */
TMS_SIM_EXPORT int tms_sim_take_memory(int device, int64_t bytes);

/* Work in flight: enqueues on `stream` (a CUstream, NULL for the legacy stream of the current context) a "kernel" that adds
 * `value` to each of `bytes` bytes at `address`, no sooner than tms_sim_open_gate(gate) was called; gate 0 means no gate.
 * Returns a CUresult. Touching memory that is not mapped, or not accessible to the stream's device, makes the context
 * sticky: CUDA_ERROR_ILLEGAL_ADDRESS from then on, and after its end the device is of no use to the process any more:
 * CUDA_ERROR_DEVICE_UNAVAILABLE, until tms_sim_reset. In a stream that is capturing it becomes part of the graph. */
TMS_SIM_EXPORT int tms_sim_launch_add(void *stream, uint64_t address, uint64_t bytes, uint8_t value, int gate);
/* Operators: whole functions of a framework, done by a device process: a process of the program's that maps the memory of
 * the devices and speaks the protocol in operators/channel.h. */
typedef struct tms_sim_operand {
    uint64_t address, bytes; /* on a device */
    int written;             /* whether the operator may write there */
} tms_sim_operand_t;
typedef struct tms_sim_operator {
    void *stream; /* a CUstream */
    int gate;     /* as in tms_sim_launch_add */
    const tms_sim_operand_t *operands;
    size_t operand_count;
    const char *request; /* what the device process is to do: its own language */
    size_t bytes;
} tms_sim_operator_t;
typedef struct tms_sim_answer {
    char *text; /* ends with a NUL, which is not counted */
    size_t bytes;
} tms_sim_answer_t;
/* Takes over a connected stream socket, whose other end the device process has. A forked child loses it. */
TMS_SIM_EXPORT void tms_sim_attach_device_process(int socket);
/* Enqueues an operator, or captures it, and returns a CUresult. Everything is copied. Memory that cannot be touched at its
 * turn makes the context sticky with CUDA_ERROR_ILLEGAL_ADDRESS, a failure in the device process with CUDA_ERROR_ASSERT, and
 * its end with CUDA_ERROR_LAUNCH_FAILED. */
TMS_SIM_EXPORT int tms_sim_run_operator(const tms_sim_operator_t *what);
/* The same, and waits for what the device process answers, a failure included. Not in a capture. */
TMS_SIM_EXPORT int tms_sim_ask_operator(const tms_sim_operator_t *what, tms_sim_answer_t *answer);
TMS_SIM_EXPORT void tms_sim_free_answer(tms_sim_answer_t *answer);
/* Kernels of PyTorch that were launched and interpreted (in a capture: recorded), and that were skipped, since reset. The
 * elementwise fills, conversions, additions, multiplications, divisions, comparisons for equality, and the sums, means,
 * maxima, minima, all and any are; see kernels/names.c. */
TMS_SIM_EXPORT uint64_t tms_sim_kernels_launched(void);
TMS_SIM_EXPORT uint64_t tms_sim_kernels_skipped(void);
/* Whether others are skipped: see TMS_SIMULATED_KERNELS. */
TMS_SIM_EXPORT void tms_sim_skip_kernels(int skip);
/* Opens a gate, for good (until tms_sim_reset). */
TMS_SIM_EXPORT void tms_sim_open_gate(int gate);
/* Blocks until a thread waits for the device, in cuCtxSynchronize, cuStreamSynchronize or another call that waits (a test's
 * way to know that a thread is waiting). */
TMS_SIM_EXPORT void tms_sim_wait_until_synchronizing(void);
/* Makes a device's context fail with `code` from now on (CUDA_ERROR_ILLEGAL_ADDRESS, ...), as after a fault. Lasts until the
 * context is destroyed; then the device is unavailable, until tms_sim_reset. */
TMS_SIM_EXPORT void tms_sim_lose_device(int device, int code);

#endif
