/* The simulated GPU: a CUDA driver, and the part of the CUDA runtime that this project and its demo use. It stores real
 * bytes in host memory.
 *
 * The library (_simulated_cuda.so) exports the driver's cu* functions under the names and versions of the real libcuda,
 * the runtime's cuda* functions, NCCL's nccl* functions, and the control functions below. The TMS_SIMULATED_* variables
 * configure it at first use; the control functions configure it later. One mutex guards its whole state. One worker
 * thread serves each stream. The core does not link with it: a test sets TMS_CUDA_DRIVER to its path. Loading the library
 * has no effect.
 *
 * Memory is real. A reservation is mmap(PROT_NONE). Physical memory is a piece of its device's memfd; it is charged to
 * the device's budget and filled with a poison byte. A map is MAP_FIXED|MAP_SHARED without access, set-access is
 * mprotect, and an unmap restores PROT_NONE. Device pointers are host addresses, so tests read the bytes directly.
 *
 * A kernel can be launched if the simulator implements it: see the table in runtime/kernels.c, and runtime/modules.c. The
 * launch of any other kernel fails with cudaErrorNotSupported, and stderr names the kernel once.
 *
 * Differences from the real driver:
 *   - cudaMalloc and cuMemAlloc charge whole multiples of the granularity. Contexts and modules are not charged.
 *   - A call that needs a current context fails with the context's sticky error. Calls of the virtual memory management
 *     need no context and continue to work.
 *   - An asynchronous copy from or to pageable host memory returns when it is complete.
 *   - The text of CUDA_ERROR_ILLEGAL_ADDRESS names the access, and so does that of a copy's CUDA_ERROR_INVALID_VALUE.
 *   - NVML reports constant clocks, power, temperature and utilisation.
 *   - A device's UUID contains a hash of TMS_SIMULATED_SHARED.
 *   - cuMemFreeHost and cuMemHostUnregister wait for all work of the context in which the memory was pinned, as the real
 *     ones do. They also wait for copies of other devices that use the memory. Other threads can launch kernels during
 *     the wait; the real driver blocks them. cuMemFree waits for the whole context. cuMemUnmap waits only for the chunk
 *     of at most 1 MiB that a worker is touching.
 *   - A forked child of a process that has used the library gets CUDA_ERROR_NOT_INITIALIZED from every call, except those
 *     that do not depend on the device: versions, names of errors, cudaGetDeviceCount, cuThreadExchangeStreamCaptureMode.
 *   - Exported memory is charged to the process that created it while that process lives, whichever process holds it.
 * tests/conformance/driver/known_differences.json lists the other differences and their reasons. */
#ifndef TMS_SIMULATOR_H
#define TMS_SIMULATOR_H

#include <stddef.h>
#include <stdint.h>

#include "include/tms.h"

#define TMS_SIM_EXPORT __attribute__((visibility("default")))

enum { TMS_SIM_MAX_DEVICES = 8, TMS_SIM_GRANULARITY = 2 << 20, TMS_SIM_POISON = 0xA5, TMS_SIM_DRIVER_VERSION = 13000 };

/* Environment, read at the first call:
 *   TMS_SIMULATED_DEVICES      number of devices, default 1 (0: cuInit returns CUDA_ERROR_NO_DEVICE)
 *   TMS_SIMULATED_VISIBLE      1: CUDA_VISIBLE_DEVICES selects devices by the rules of the real driver; default 0,
 *                              because the variable may refer to the real devices of the machine
 *   TMS_SIMULATED_MEMORY       bytes per device, with suffix KiB, MiB or GiB; default 8GiB
 *   TMS_SIMULATED_BANDWIDTH    bytes per second of the copies of a stream; 0 (default): as fast as memcpy
 *   TMS_SIMULATED_PEERS        0: no device can access another; default 1
 *   TMS_SIMULATED_POISON       allocations up to this size (default 8MiB) are filled with the byte 0xA5 when created. In
 *                              larger ones only the first and the last 64 KiB are filled, so that large tests stay fast.
 *                              Their other bytes are zero, or 0xA5 where freed memory is reused
 *   TMS_SIMULATED_NCCL_MEMORY  bytes of its device that a rank of an NCCL communicator holds, with suffix; default 16MiB
 *   TMS_SIMULATED_SHARED       a name: processes with the same name share the budgets (POSIX shared memory)
 *   TMS_SIMULATED_TRACE        an absolute path: every call is appended to this file, one per line
 *   TMS_SIMULATED_REPORT       1: at exit, resources still in use are printed to stderr
 *   TMS_SIMULATED_FAULT        "call:succeed:fail:code[,call:...]": the function `call` succeeds `succeed` times, then
 *                              fails `fail` times with the error `code`, then succeeds again */

/* Restores the state after loading, with this many devices and this much memory per device. Frees every allocation. No other
 * thread may be in the simulator. `devices` 0 simulates a machine with a driver and no GPU. Only these variables of the
 * environment remain in force: TMS_SIMULATED_TRACE, TMS_SIMULATED_REPORT, TMS_SIMULATED_SHARED (the first process of the
 * name set the budgets) and TMS_SIMULATED_POISON. */
TMS_SIM_EXPORT void tms_sim_reset(int devices, uint64_t memory_bytes);
TMS_SIM_EXPORT void tms_sim_set_bandwidth(uint64_t bytes_per_second);
/* Whether devices can access each other's memory (cuDeviceCanAccessPeer). Default: they can. */
TMS_SIM_EXPORT void tms_sim_set_peer_capable(int can);
/* Allocations up to this size are poisoned entirely: see TMS_SIMULATED_POISON. */
TMS_SIM_EXPORT void tms_sim_set_poison_limit(uint64_t bytes);
/* Every later call fails with CUDA_ERROR_DEINITIALIZED, as during process exit, until tms_sim_reset. */
TMS_SIM_EXPORT void tms_sim_deinitialize(void);

/* Fault injection: the driver or runtime function `call` succeeds `succeed` more times, then fails `fail` times with
 * `code` and without effect, then succeeds again. Names are those of the documentation, with or without the ABI suffix
 * ("cuMemGetInfo" and "cuMemGetInfo_v2" are the same). `call` "*" means every driver call that can touch the device: not
 * cuGetErrorName, cuGetErrorString, cuDriverGetVersion and cuGetProcAddress. There is one rule per name; a new rule
 * replaces the old one, and `fail` 0 removes it. Returns 0, or 1 if there is no such function. */
TMS_SIM_EXPORT int tms_sim_fail_after(const char *call, uint64_t succeed, uint64_t fail, int code);
TMS_SIM_EXPORT uint64_t tms_sim_failures_fired(void); /* since the reset */

/* Calls since the reset or the last tms_sim_clear_counts: of one function, or of all for "*". Only the program's calls
 * count; calls inside a runtime function do not. */
TMS_SIM_EXPORT uint64_t tms_sim_calls(const char *call);
TMS_SIM_EXPORT void tms_sim_clear_counts(void); /* also clears the trace */
/* Calls that failed because a forked child made them; tms_sim_calls is 0 there. */
TMS_SIM_EXPORT uint64_t tms_sim_calls_in_child(void);

/* The trace: names of the calls in order, separated by '\n', from the first call after it was cleared. Writes at most
 * `capacity` bytes, including the NUL, and returns the full length. Calls are recorded only after tms_sim_trace(1). */
TMS_SIM_EXPORT void tms_sim_trace(int on);
TMS_SIM_EXPORT size_t tms_sim_read_trace(char *text, size_t capacity);

/* The current allocations of this process. */
typedef struct tms_sim_usage {
    uint64_t physical_bytes;      /* charged to the device's budget, including cudaMalloc, without tms_sim_take_memory */
    uint64_t handles;             /* live allocations of cuMemCreate, including released ones that are still mapped */
    uint64_t mappings;            /* of handles of this device */
    uint64_t reservations;        /* of the whole process */
    uint64_t host_bytes;          /* pinned host memory of the whole process, allocated and registered */
    uint64_t streams;             /* live streams of the device, without the legacy stream */
    uint64_t runtime_allocations; /* live allocations of cudaMalloc and cuMemAlloc */
} tms_sim_usage_t;
TMS_SIM_EXPORT void tms_sim_usage(int device, tms_sim_usage_t *usage);
TMS_SIM_EXPORT uint64_t tms_sim_events(void); /* live events of the whole process */
/* References to the device's primary context: retains minus releases, plus one for a runtime that uses it. */
TMS_SIM_EXPORT uint64_t tms_sim_context_references(int device);

/* Simulates memory that another process holds: charges the device's budget without an allocation. A negative value
 * returns memory. Returns 0 on success, otherwise 2. */
TMS_SIM_EXPORT int tms_sim_take_memory(int device, int64_t bytes);

/* Computes the fingerprint of contents in this process's memory, as the kernel of csrc/include/tms_fingerprint.h does on a
 * device. `key` is a tms_fingerprint_key_t. `bytes` is a multiple of 16, at most TMS_FINGERPRINT_CHUNK_BYTES. */
TMS_SIM_EXPORT void tms_sim_fingerprint(const void *key, const void *contents, uint64_t bytes, uint32_t words[4]);

/* Work in flight. Enqueues a "kernel" on `stream` (a CUstream; NULL is the legacy stream of the current context). It adds
 * `value` to each of `bytes` bytes at `address`, after tms_sim_open_gate(gate) was called; gate 0 means no gate. Returns
 * a CUresult. Access to memory that is not mapped, or not accessible to the stream's device, makes
 * CUDA_ERROR_ILLEGAL_ADDRESS the context's sticky error. After that context is destroyed, the process gets
 * CUDA_ERROR_DEVICE_UNAVAILABLE for the device until tms_sim_reset. In a capturing stream the kernel becomes a graph
 * node. */
TMS_SIM_EXPORT int tms_sim_launch_add(void *stream, uint64_t address, uint64_t bytes, uint8_t value, int gate);
/* Operators: functions of a framework that the device process executes. The device process belongs to the program, maps
 * the memory of the devices and speaks the protocol in operators/channel.h. */
typedef struct tms_sim_operand {
    uint64_t address, bytes; /* in device memory */
    int written;             /* the operator may write this range */
} tms_sim_operand_t;
/* The state that PyTorch's generator gives to a random kernel. One random number is derived from it. */
typedef struct tms_sim_draw {
    uint64_t seed, offset; /* if captured: the device addresses of the values of each replay */
    uint64_t addend;       /* if captured: a number that is added to the offset of each replay */
    int captured;
} tms_sim_draw_t;
typedef struct tms_sim_operator {
    void *stream;     /* a CUstream */
    const char *name; /* for messages; NULL: none */
    int gate;         /* as in tms_sim_launch_add */
    const tms_sim_operand_t *operands;
    size_t operand_count;
    const char *request; /* the request to the device process, in its own format */
    size_t bytes;
    const tms_sim_draw_t *draw; /* the device process gets the number drawn from it; NULL: it gets 0 */
} tms_sim_operator_t;
typedef struct tms_sim_answer {
    char *text; /* NUL-terminated; the NUL is not counted in `bytes` */
    size_t bytes;
} tms_sim_answer_t;
/* Takes ownership of a connected stream socket; the device process holds the other end. A forked child closes its copy. */
TMS_SIM_EXPORT void tms_sim_attach_device_process(int socket);
/* Enqueues an operator, or captures it, and returns a CUresult. All arguments are copied. The operator runs later; an
 * error then becomes the context's sticky error: CUDA_ERROR_ILLEGAL_ADDRESS for inaccessible memory, CUDA_ERROR_ASSERT
 * for a failure in the device process, CUDA_ERROR_LAUNCH_FAILED if that process has exited. */
TMS_SIM_EXPORT int tms_sim_run_operator(const tms_sim_operator_t *description);
/* Enqueues an operator and waits for the reply of the device process, which may report a failure. Not allowed during a
 * capture. */
TMS_SIM_EXPORT int tms_sim_ask_operator(const tms_sim_operator_t *description, tms_sim_answer_t *answer);
TMS_SIM_EXPORT void tms_sim_free_answer(tms_sim_answer_t *answer);
/* Until the next tms_sim_end_draw, a random kernel that this thread launches does not run. The launch has advanced
 * PyTorch's generator, and its arguments become the draw. tms_sim_end_draw returns 0, or 1 if there was no such launch. */
TMS_SIM_EXPORT void tms_sim_begin_draw(void);
TMS_SIM_EXPORT int tms_sim_end_draw(tms_sim_draw_t *draw);
/* The function table of the library that manages memory: messages about inaccessible memory then name the tag and the time
 * of its pause. Its `find` is called without the simulator's lock, on streams' threads too. A reset keeps it. NULL: none. */
TMS_SIM_EXPORT void tms_sim_set_manager(const tms_api_t *manager);
/* The workspace of a cublasHandle_t as an operand, for an operator that uses cuBLAS on a GPU. It has 0 bytes if the handle
 * has no workspace. */
TMS_SIM_EXPORT tms_sim_operand_t tms_sim_blas_workspace(const void *handle);
/* Opens a gate permanently (until tms_sim_reset). */
TMS_SIM_EXPORT void tms_sim_open_gate(int gate);
/* Blocks until a thread waits for the device in cuCtxSynchronize, cuStreamSynchronize or another waiting call. Tests use
 * it to synchronise with a thread that waits. */
TMS_SIM_EXPORT void tms_sim_wait_until_synchronizing(void);
/* Sets the sticky error of a device's context to `code` (CUDA_ERROR_ILLEGAL_ADDRESS, ...), as a fault does. The error
 * lasts until the context is destroyed. After that the device is unavailable until tms_sim_reset. */
TMS_SIM_EXPORT void tms_sim_lose_device(int device, int code);
/* Gives lost devices back to the process, which no real GPU does: clears the sticky errors of primary contexts. Memory keeps
 * its contents, and queued work is lost. Returns the first of these errors, or 0. The pytest plugin calls it between tests,
 * when the devices are idle. */
TMS_SIM_EXPORT int tms_sim_recover(void);

#endif
