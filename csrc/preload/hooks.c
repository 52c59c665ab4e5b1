#include "hooks.h"

#include "abi/start.h"
#include "core/allocation/allocation.h"
#include "core/allocation/capture_end.h"
#include "core/allocation/free.h"
#include "core/model/inspect.h"
#include "core/model/peers.h"
#include "count.h"
#include "device/capture_mode.h"
#include "interpreter.h"

/* ---- allocations ---- */

/* After cudaMalloc the program has a current context, even if that was its first CUDA call. A managed allocation needs none,
 * so this makes the runtime create one. */
static tms_status_t ensure_context(tms_state_t *state, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "allocate", .device = TMS_NO_DEVICE};
    const tms_driver_table_t *driver = NULL;
    CUcontext current = NULL;
    tms_status_t status = tms_saver_check_process(&state->saver, &context, error);
    if (status == TMS_OK) status = tms_devices_load(&state->devices, &driver, NULL, &context, error);
    if (status != TMS_OK) return status;
    if (driver->cuCtxGetCurrent && driver->cuCtxGetCurrent(&current) == CUDA_SUCCESS && current) return TMS_OK;
    tms_cudaFree_t initialize = TMS_REAL(state, cudaFree);
    if (!initialize) return TMS_OK;
    tms_capture_mode_relax(driver, &state->log);
    tms_cuda_error_t result = initialize(NULL);
    tms_capture_mode_restore(driver, &state->log);
    if (result == TMS_CUDA_SUCCESS) return TMS_OK;
    return tms_error_set(error, TMS_DRIVER_UNAVAILABLE, &context, "the CUDA runtime did not initialise");
}

static tms_cuda_error_t allocate_ordinary(const tms_count_t *count, void **address, size_t bytes) {
    tms_cuda_error_t result;
    TMS_CALL_REAL(result, count->state, cudaMalloc, address, bytes);
    if (result == TMS_CUDA_SUCCESS && address) tms_count_add(count, TMS_HOOK_cudaMalloc, (uintptr_t)*address, bytes);
    return result;
}

static tms_cuda_error_t allocate_managed(const tms_count_t *count, const tms_region_t *region, void **address,
                                         size_t bytes) {
    tms_state_t *state = count->state;
    uint64_t managed = 0;
    tms_error_t error;
    tms_status_t status = ensure_context(state, &error);
    if (status == TMS_OK) status = tms_allocation_create(&state->saver, region, bytes, TMS_NO_DEVICE, &managed, &error);
    if (status == TMS_OK) {
        *address = (void *)(uintptr_t)managed;
        tms_interpreter_prepare_sharing(state);
        return TMS_CUDA_SUCCESS;
    }
    if (tms_hook_is_final(status)) {
        /* Programs expect and handle a lack of device memory. */
        tms_log_level_t level = status == TMS_OUT_OF_DEVICE_MEMORY ? TMS_LOG_INFO : TMS_LOG_WARNING;
        tms_log_write(&state->log, level, "%s", error.message);
        return tms_compat_cuda_error(status, &error);
    }
    tms_cuda_error_t result = allocate_ordinary(count, address, bytes);
    if (result == TMS_CUDA_SUCCESS)
        tms_log_once(&state->log, &state->warned_not_managed, TMS_LOG_WARNING,
                     "an allocation in a region is not managed and cannot be paused: %s", error.message);
    return result;
}

/* The real function handles a NULL pointer and a size of 0. */
tms_cuda_error_t cudaMalloc(void **address, size_t bytes) {
    tms_count_t count = tms_count_begin(__builtin_return_address(0));
    tms_cuda_error_t result;
    tms_region_t region = {.managed = false};
    /* The thread's own region applies. The settings of a capture are for torch's pools, because another thread's cudaMalloc
     * does not belong to the graph. An allocation inside another hook is not the program's. */
    if (!count.nested && count.state && address && bytes > 0) region = tms_region_current(&count.state->regions, NULL);
    if (region.managed)
        result = allocate_managed(&count, &region, address, bytes);
    else
        result = allocate_ordinary(&count, address, bytes);
    tms_count_end(&count);
    return result;
}

/* A managed address never reaches the real function. Every other address does, NULL included: programs initialise the
 * runtime with cudaFree(NULL). */
tms_cuda_error_t cudaFree(void *address) {
    tms_state_t *state = tms_hook_state();
    tms_error_t error;
    if (address && state) {
        tms_status_t status = tms_free_address(&state->saver, (uintptr_t)address, &error);
        if (status == TMS_OK) return TMS_CUDA_SUCCESS;
        if (status != TMS_NOT_MANAGED) {
            tms_log_write(&state->log, TMS_LOG_WARNING, "%s", error.message);
            return tms_compat_cuda_error(status, &error);
        }
    }
    tms_count_t count = tms_count_begin(NULL);
    tms_ledger_taken_t taken = tms_count_take(&count, (uintptr_t)address);
    tms_cuda_error_t result;
    TMS_CALL_REAL(result, state, cudaFree, address);
    tms_count_settle(&count, taken, result == TMS_CUDA_SUCCESS);
    tms_count_end(&count);
    return result;
}

tms_cuda_error_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
    tms_state_t *state = tms_hook_state();
    tms_cuda_error_t result;
    tms_error_t error;
    TMS_CALL_REAL(result, state, cudaDeviceEnablePeerAccess, peer, flags);
    bool enabled = result == TMS_CUDA_SUCCESS || result == TMS_CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    if (!enabled || !state || !tms_saver_has_segments(&state->saver)) return result;
    if (tms_peers_refresh(&state->saver, &error) != TMS_OK) tms_log_write(&state->log, TMS_LOG_WARNING, "%s", error.message);
    return result;
}

/* CUDA has no IPC handles for managed memory. The real function's failure is returned, and explained once. */
tms_cuda_error_t cudaIpcGetMemHandle(void *handle, void *address) {
    tms_state_t *state = tms_state_if_made(); /* without a state nothing is managed */
    tms_segment_info_t row;
    tms_cuda_error_t result;
    TMS_CALL_REAL(result, state, cudaIpcGetMemHandle, handle, address);
    if (result == TMS_CUDA_SUCCESS || !state || tms_inspect_find(&state->saver, (uintptr_t)address, 1, &row) != TMS_OK)
        return result;
    tms_log_once(
        &state->log, &state->warned_no_ipc, TMS_LOG_WARNING,
        "cudaIpcGetMemHandle failed, because the memory is managed (tag '%s', %llu bytes) and CUDA has no IPC handles "
        "for it. PyTorch needs no such handle once torch_memory_saver is in use in the process: import it and call "
        "torch_memory_saver.stats() before the first tensor is sent. Programs without PyTorch must allocate the memory that "
        "they share outside of regions",
        row.tag, (unsigned long long)row.bytes);
    return result;
}

/* ---- captures ---- */

/* The stream that a handle denotes. The suffixed functions use NULL for the per-thread default stream. */
static void *resolve_stream(void *stream, bool per_thread) {
    if (stream) return stream;
    return per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* Announces a capture before it begins, because a pause in between would invalidate it. Returns false if the capture must
 * not begin. */
static bool announce(tms_state_t *state, void *stream, tms_capture_start_t *begun) {
    tms_error_t error;
    tms_status_t status = tms_capture_table_begin_on(&state->saver, stream, begun, &error);
    if (status == TMS_OK || status == TMS_FORKED) return true; /* in a forked child captures fail anyway */
    if (begun->must_not_begin)
        tms_log_write(&state->log, TMS_LOG_WARNING, "%s", error.message);
    else
        tms_state_warn_too_many_captures(state);
    return !begun->must_not_begin;
}

/* Whether a capture is still active although ending it failed (on the wrong thread). */
static bool goes_on(const tms_state_t *state, void *stream) {
    const tms_driver_table_t *driver = atomic_load(&state->driver.table);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!driver || !driver->cuStreamIsCapturing) return false;
    return driver->cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Retracts the announcement if the begin failed, unless it belongs to an earlier capture, which may still be active. */
static void after_begin(tms_state_t *state, const tms_capture_start_t *begun, bool failed) {
    if (begun->identity == 0) return;
    if (failed && !begun->known)
        (void)tms_capture_end_of(&state->saver, begun->identity);
    else
        tms_capture_table_begun(&state->saver, begun->identity);
}

/* Announces the capture, and begins it with the real function. */
#define BEGIN_CAPTURE(name, stream, per_thread, ...)                                                                        \
    do {                                                                                                                    \
        tms_state_t *state = tms_hook_state();                                                                              \
        tms_capture_start_t begun = {.identity = 0};                                                                        \
        tms_cuda_error_t result;                                                                                            \
        if (state && !announce(state, resolve_stream((stream), (per_thread)), &begun))                                      \
            return TMS_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;                                                               \
        TMS_CALL_REAL(result, state, name, __VA_ARGS__);                                                                    \
        after_begin(state, &begun, result != TMS_CUDA_SUCCESS);                                                             \
        return result;                                                                                                      \
    } while (0)

/* Ends the capture with the real function. An end without a recorded begin has no effect. */
#define END_CAPTURE(name, stream, per_thread, ...)                                                                          \
    do {                                                                                                                    \
        tms_state_t *state = tms_hook_state();                                                                              \
        void *target = resolve_stream((stream), (per_thread));                                                              \
        tms_cuda_error_t result;                                                                                            \
        TMS_CALL_REAL(result, state, name, __VA_ARGS__);                                                                    \
        if (state && (result == TMS_CUDA_SUCCESS || !goes_on(state, target))) tms_capture_end_on(&state->saver, target);    \
        return result;                                                                                                      \
    } while (0)

tms_cuda_error_t cudaStreamBeginCapture(void *stream, int mode) {
    BEGIN_CAPTURE(cudaStreamBeginCapture, stream, false, stream, mode);
}

tms_cuda_error_t cudaStreamBeginCapture_ptsz(void *stream, int mode) {
    BEGIN_CAPTURE(cudaStreamBeginCapture_ptsz, stream, true, stream, mode);
}

tms_cuda_error_t cudaStreamBeginCaptureToGraph(void *stream, void *graph, const void *dependencies, const void *edges,
                                               size_t count, int mode) {
    BEGIN_CAPTURE(cudaStreamBeginCaptureToGraph, stream, false, stream, graph, dependencies, edges, count, mode);
}

tms_cuda_error_t cudaStreamBeginCaptureToGraph_ptsz(void *stream, void *graph, const void *dependencies, const void *edges,
                                                    size_t count, int mode) {
    BEGIN_CAPTURE(cudaStreamBeginCaptureToGraph_ptsz, stream, true, stream, graph, dependencies, edges, count, mode);
}

tms_cuda_error_t cudaStreamEndCapture(void *stream, void **graph) {
    END_CAPTURE(cudaStreamEndCapture, stream, false, stream, graph);
}

tms_cuda_error_t cudaStreamEndCapture_ptsz(void *stream, void **graph) {
    END_CAPTURE(cudaStreamEndCapture_ptsz, stream, true, stream, graph);
}

/* Stops querying the stream before it is destroyed. */
tms_cuda_error_t cudaStreamDestroy(void *stream) {
    tms_state_t *state = tms_state_if_made(); /* without a state no capture was announced */
    tms_capture_stream_t taken[TMS_CAPTURE_MAX_NESTED];
    tms_cuda_error_t result;
    size_t count = state && stream ? tms_capture_end_take(&state->saver, stream, TMS_NO_DEVICE, taken) : 0;
    TMS_CALL_REAL(result, state, cudaStreamDestroy, stream);
    if (count > 0) tms_capture_end_taken(&state->saver, taken, count, result == TMS_CUDA_SUCCESS);
    return result;
}

/* Stops querying the streams of the device before its context is reset. */
tms_cuda_error_t cudaDeviceReset(void) {
    const tms_error_context_t context = {.operation = "cudaDeviceReset", .device = TMS_NO_DEVICE};
    tms_state_t *state = tms_state_if_made();
    tms_capture_stream_t taken[TMS_CAPTURE_MAX_NESTED];
    tms_cuda_error_t result;
    size_t count = 0;
    int device = TMS_NO_DEVICE;
    if (state && tms_capture_visible(&state->saver.capture) > 0 &&
        tms_devices_current(&state->devices, &device, &context, NULL) == TMS_OK)
        count = tms_capture_end_take(&state->saver, NULL, device, taken);
    int counted = tms_count_device(state, TMS_HOOK_cudaDeviceReset);
    TMS_CALL_REAL(result, state, cudaDeviceReset);
    if (state && result == TMS_CUDA_SUCCESS) tms_ledger_clear_device(&state->ledger, counted);
    if (count > 0) tms_capture_end_taken(&state->saver, taken, count, result == TMS_CUDA_SUCCESS);
    return result;
}
