/* Names and descriptions of the errors that the simulated GPU returns or a test may inject. */
#include "simulator/base/simulation.h"
#include "simulator/control/entries.h"
#include "simulator/control/life.h"
#include "simulator/simulator.h"

/* The runtime's header declares these, but is not required to build this. */
TMS_SIM_EXPORT const char *cudaGetErrorName(CUresult error);
TMS_SIM_EXPORT const char *cudaGetErrorString(CUresult error);

/* X(driver's name, runtime's name, description) */
#define ERRORS(X)                                                                                                           \
    X(CUDA_SUCCESS, cudaSuccess, "no error")                                                                                \
    X(CUDA_ERROR_INVALID_VALUE, cudaErrorInvalidValue, "invalid argument")                                                  \
    X(CUDA_ERROR_OUT_OF_MEMORY, cudaErrorMemoryAllocation, "out of memory")                                                 \
    X(CUDA_ERROR_NOT_INITIALIZED, cudaErrorInitializationError, "initialization error")                                     \
    X(CUDA_ERROR_DEINITIALIZED, cudaErrorCudartUnloading, "driver shutting down")                                           \
    X(CUDA_ERROR_DEVICE_UNAVAILABLE, cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable")      \
    X(CUDA_ERROR_NO_DEVICE, cudaErrorNoDevice, "no CUDA-capable device is detected")                                        \
    X(CUDA_ERROR_INVALID_DEVICE, cudaErrorInvalidDevice, "invalid device ordinal")                                          \
    X(CUDA_ERROR_INVALID_CONTEXT, cudaErrorDeviceUninitialized, "invalid device context")                                   \
    X(CUDA_ERROR_MAP_FAILED, cudaErrorMapBufferObjectFailed, "mapping of buffer object failed")                             \
    X(CUDA_ERROR_UNMAP_FAILED, cudaErrorUnmapBufferObjectFailed, "unmapping of buffer object failed")                       \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, cudaErrorECCUncorrectable, "uncorrectable ECC error encountered")                       \
    X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, cudaErrorPeerAccessUnsupported,                                                   \
      "peer access is not supported between these two devices")                                                             \
    X(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, cudaErrorJitCompilerNotFound, "PTX JIT compiler library not found")                \
    X(CUDA_ERROR_JIT_COMPILATION_DISABLED, cudaErrorJitCompilationDisabled, "PTX JIT compilation was disabled")             \
    X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, cudaErrorLaunchOutOfResources, "too many resources requested for launch")         \
    X(CUDA_ERROR_OPERATING_SYSTEM, cudaErrorOperatingSystem, "OS call failed or operation not supported on this OS")        \
    X(CUDA_ERROR_INVALID_HANDLE, cudaErrorInvalidResourceHandle, "invalid resource handle")                                 \
    X(CUDA_ERROR_ILLEGAL_STATE, cudaErrorIllegalState, "the operation cannot be performed in the present state")            \
    X(CUDA_ERROR_NOT_FOUND, cudaErrorSymbolNotFound, "named symbol not found")                                              \
    X(CUDA_ERROR_NOT_READY, cudaErrorNotReady, "device not ready")                                                          \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, cudaErrorIllegalAddress, "an illegal memory access was encountered")                      \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, cudaErrorLaunchTimeout, "the launch timed out and was terminated")                         \
    X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")          \
    X(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, cudaErrorPeerAccessNotEnabled, "peer access has not been enabled")                \
    X(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, cudaErrorSetOnActiveProcess, "cannot set while device is active in this process")  \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, cudaErrorContextIsDestroyed, "context is destroyed")                                 \
    X(CUDA_ERROR_ASSERT, cudaErrorAssert, "device-side assert triggered")                                                   \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cudaErrorHostMemoryAlreadyRegistered,                                      \
      "part or all of the requested memory range is already mapped")                                                        \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cudaErrorHostMemoryNotRegistered,                                              \
      "pointer does not correspond to a registered memory region")                                                          \
    X(CUDA_ERROR_LAUNCH_FAILED, cudaErrorLaunchFailure, "unspecified launch failure")                                       \
    X(CUDA_ERROR_NOT_PERMITTED, cudaErrorNotPermitted, "operation not permitted")                                           \
    X(CUDA_ERROR_NOT_SUPPORTED, cudaErrorNotSupported, "operation not supported")                                           \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cudaErrorStreamCaptureUnsupported,                                             \
      "operation not permitted when stream is capturing")                                                                   \
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cudaErrorStreamCaptureInvalidated,                                             \
      "operation failed due to a previous error during capture")                                                            \
    X(CUDA_ERROR_STREAM_CAPTURE_MERGE, cudaErrorStreamCaptureMerge,                                                         \
      "operation would result in a merge of separate capture sequences")                                                    \
    X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cudaErrorStreamCaptureUnmatched,                                                 \
      "capture was not ended in the same stream as it began")                                                               \
    X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")             \
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cudaErrorStreamCaptureIsolation,                                                 \
      "dependency created on uncaptured work in another stream")                                                            \
    X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cudaErrorStreamCaptureImplicit,                                                   \
      "operation would make the legacy stream depend on a capturing blocking stream")                                       \
    X(CUDA_ERROR_CAPTURED_EVENT, cudaErrorCapturedEvent,                                                                    \
      "operation not permitted on an event last recorded in a capturing stream")                                            \
    X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, cudaErrorStreamCaptureWrongThread,                                            \
      "attempt to terminate a thread-local capture sequence from another thread")                                           \
    X(CUDA_ERROR_UNKNOWN, cudaErrorUnknown, "unknown error")

typedef struct sim_error_text {
    int code;
    const char *driver, *runtime, *description;
} sim_error_text_t;

#define ERROR_TEXT(driver, runtime, description) {driver, #driver, #runtime, description},
static const sim_error_text_t texts[] = {ERRORS(ERROR_TEXT)};

static const sim_error_text_t *find_text(CUresult error) {
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (texts[i].code == (int)error) return &texts[i];
    }
    return NULL;
}

CUresult sim_error_name(CUresult error, const char **text) {
    const sim_error_text_t *found = find_text(error);
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    *text = found ? found->driver : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_error_string(CUresult error, const char **text) {
    const sim_error_text_t *found = find_text(error);
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    *text = found ? found->description : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

TMS_SIM_EXPORT const char *cudaGetErrorName(CUresult error) {
    const sim_error_text_t *found = find_text(error);
    return found ? found->runtime : "unrecognized error code";
}

/* Names the access that has failed, if one has. */
TMS_SIM_EXPORT const char *cudaGetErrorString(CUresult error) {
    const sim_error_text_t *found = find_text(error);
    const char *refused = sim_state_thread()->refused_access;
    if (error == CUDA_ERROR_ILLEGAL_ADDRESS && sim_state.illegal_access[0]) {
        atomic_store(&sim_state.illegal_access_read, true);
        return sim_state.illegal_access;
    }
    if (error == CUDA_ERROR_INVALID_VALUE && refused[0]) return refused;
    return found ? found->description : "unrecognized error code";
}

/* These two access only the thread's last error; they are not counted and no fault applies. */
TMS_SIM_EXPORT CUresult cudaGetLastError(void);
TMS_SIM_EXPORT CUresult cudaPeekAtLastError(void);

static CUresult last_error(bool clear) {
    if (!sim_life_enter()) return CUDA_ERROR_NOT_INITIALIZED;
    sim_thread_t *thread = sim_state_thread();
    CUresult error = (CUresult)thread->last_error;
    /* This also clears a sticky error. The next call that needs the context sets it again. */
    if (clear) thread->last_error = CUDA_SUCCESS;
    sim_life_leave();
    return error;
}

CUresult cudaGetLastError(void) { return last_error(true); }

CUresult cudaPeekAtLastError(void) { return last_error(false); }
