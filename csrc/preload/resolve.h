/* The interposed functions of the CUDA runtime and driver, in X-macros, and the search for the real ones.
 *
 * The real function is the next one in the search order (RTLD_NEXT). If there is none (Python packages open the runtime with
 * RTLD_LOCAL, and the runtime opens the driver in the same way), it is the function of the libcudart or libcuda that is
 * already loaded. The search loads no library. The state keeps the result (state.h: real[]). Any thread; no lock is held
 * during the search. */
#ifndef TMS_PRELOAD_RESOLVE_H
#define TMS_PRELOAD_RESOLVE_H

#include <cuda.h>
#include <stddef.h>

#include "abi/compat.h"
#include "abi/state.h"

/* A macro of cuda.h. Both functions are named here by their symbols. */
#undef cuGetProcAddress

/* The layouts of cudaPitchedPtr and cudaExtent. */
typedef struct tms_pitched {
    void *address;
    size_t pitch, width, height;
} tms_pitched_t;
typedef struct tms_box {
    size_t width, height, depth;
} tms_box_t;

/* X(function, parameter list) for each interposed function of the runtime. Stream, pool and graph handles are pointers. The
 * functions that destroy a stream or its context are interposed because they end an active capture. Programs built for
 * per-thread default streams call the functions with the suffix. */
#define TMS_RUNTIME_HOOKS(X)                                                                                                \
    X(cudaMalloc, (void **address, size_t bytes))                                                                           \
    X(cudaFree, (void *address))                                                                                            \
    X(cudaDeviceEnablePeerAccess, (int peer, unsigned int flags))                                                           \
    X(cudaIpcGetMemHandle, (void *handle, void *address))                                                                   \
    X(cudaStreamBeginCapture, (void *stream, int mode))                                                                     \
    X(cudaStreamBeginCapture_ptsz, (void *stream, int mode))                                                                \
    X(cudaStreamBeginCaptureToGraph,                                                                                        \
      (void *stream, void *graph, const void *dependencies, const void *edges, size_t count, int mode))                     \
    X(cudaStreamBeginCaptureToGraph_ptsz,                                                                                   \
      (void *stream, void *graph, const void *dependencies, const void *edges, size_t count, int mode))                     \
    X(cudaStreamEndCapture, (void *stream, void **graph))                                                                   \
    X(cudaStreamEndCapture_ptsz, (void *stream, void **graph))                                                              \
    X(cudaStreamDestroy, (void *stream))                                                                                    \
    X(cudaDeviceReset, (void))                                                                                              \
    X(cudaMallocPitch, (void **address, size_t *pitch, size_t width, size_t height))                                        \
    X(cudaMalloc3D, (tms_pitched_t * pitched, tms_box_t extent))                                                            \
    X(cudaMallocAsync, (void **address, size_t bytes, void *stream))                                                        \
    X(cudaMallocAsync_ptsz, (void **address, size_t bytes, void *stream))                                                   \
    X(cudaMallocFromPoolAsync, (void **address, size_t bytes, void *pool, void *stream))                                    \
    X(cudaMallocFromPoolAsync_ptsz, (void **address, size_t bytes, void *pool, void *stream))                               \
    X(cudaFreeAsync, (void *address, void *stream))                                                                         \
    X(cudaFreeAsync_ptsz, (void *address, void *stream))                                                                    \
    X(cudaGetDriverEntryPoint, (const char *symbol, void **function, unsigned long long flags, int *result))                \
    X(cudaGetDriverEntryPointByVersion,                                                                                     \
      (const char *symbol, void **function, unsigned int version, unsigned long long flags, int *result))

/* The interposed functions of the driver, under the symbols of its library. */
#define TMS_DRIVER_HOOKS(X)                                                                                                 \
    X(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                                                                 \
    X(cuMemAllocPitch_v2, (CUdeviceptr * address, size_t *pitch, size_t width, size_t height, unsigned int element_bytes))  \
    X(cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream))                                              \
    X(cuMemAllocAsync_ptsz, (CUdeviceptr * address, size_t bytes, CUstream stream))                                         \
    X(cuMemAllocFromPoolAsync, (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream))                   \
    X(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream))              \
    X(cuMemFree_v2, (CUdeviceptr address))                                                                                  \
    X(cuMemFreeAsync, (CUdeviceptr address, CUstream stream))                                                               \
    X(cuMemFreeAsync_ptsz, (CUdeviceptr address, CUstream stream))                                                          \
    X(cuMemCreate, (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *properties,             \
                    unsigned long long flags))                                                                              \
    X(cuMemRelease, (CUmemGenericAllocationHandle handle))                                                                  \
    X(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void *address))                                  \
    X(cuMemMap,                                                                                                             \
      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))    \
    X(cuMemUnmap, (CUdeviceptr address, size_t bytes))

/* Functions that are called but not interposed. */
#define TMS_RUNTIME_CALLS(X) X(cudaGetDevice, (int *device))
#define TMS_DRIVER_CALLS(X)  X(cuCtxGetDevice, (CUdevice * device)) TMS_HANDLE_CALLS(X)

/* The driver's functions that PyTorch's allocator gets an interposer of, besides those of TMS_DRIVER_HOOKS
 * (handle_hooks.h). */
#define TMS_HANDLE_CALLS(X)                                                                                                 \
    X(cuMemSetAccess, (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count))                     \
    X(cuMemAddressFree, (CUdeviceptr address, size_t bytes))                                                                \
    X(cuMemExportToShareableHandle,                                                                                         \
      (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags))     \
    X(cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp * properties, CUmemGenericAllocationHandle handle))      \
    X(cuMulticastBindMem, (CUmemGenericAllocationHandle multicast, size_t at, CUmemGenericAllocationHandle handle,          \
                           size_t offset, size_t bytes, unsigned long long flags))

/* All functions whose real version is searched for. Functions of the runtime come first, and functions of the driver that
 * may be interposed come last. */
#define TMS_REAL_FUNCTIONS(X) TMS_RUNTIME_HOOKS(X) TMS_RUNTIME_CALLS(X) TMS_DRIVER_CALLS(X) TMS_DRIVER_HOOKS(X)

typedef enum tms_hook {
#define TMS_HOOK_ENUMERATOR(name, parameters) TMS_HOOK_##name,
    TMS_REAL_FUNCTIONS(TMS_HOOK_ENUMERATOR)
#undef TMS_HOOK_ENUMERATOR
        TMS_HOOK_COUNT
} tms_hook_t;
_Static_assert((int)TMS_HOOK_COUNT <= (int)TMS_MAX_HOOKS, "the state has too little room for the real functions");

/* The type of each function, such as tms_cudaMalloc_t. */
#define TMS_RUNTIME_TYPE(name, parameters) typedef tms_cuda_error_t(*tms_##name##_t) parameters;
TMS_RUNTIME_HOOKS(TMS_RUNTIME_TYPE)
TMS_RUNTIME_CALLS(TMS_RUNTIME_TYPE)
#undef TMS_RUNTIME_TYPE
#define TMS_DRIVER_TYPE(name, parameters) typedef CUresult(*tms_##name##_t) parameters;
TMS_DRIVER_HOOKS(TMS_DRIVER_TYPE)
TMS_DRIVER_CALLS(TMS_DRIVER_TYPE)
#undef TMS_DRIVER_TYPE

/* A function of any type; cast it to its own type before the call. */
typedef void (*tms_hook_function_t)(void);

const char *tms_hook_name(tms_hook_t hook);
static inline bool tms_hook_is_of_driver(tms_hook_t hook) { return hook >= TMS_HOOK_cuCtxGetDevice; }
/* Whether the file name in a path begins with one of the prefixes. NULL ends the list. */
bool tms_hook_is_named(const char *path, const char *const *prefixes);

/* Returns the state for an interposer. NULL if there is none, because memory is short, or if TMS_DISABLE is set: the
 * interposer then only calls the real function. */
tms_state_t *tms_hook_state(void);
/* Returns the real function, or NULL if the process has none. `state` may be NULL. The result is kept if there is a state.
 */
tms_hook_function_t tms_hook_real(tms_state_t *state, tms_hook_t hook);
/* Logs once that there is no real function. Returns the error for the program, which has the same number in the runtime and
 * the driver.
 */
int tms_hook_missing(tms_state_t *state, tms_hook_t hook);

/* The real function of a hook with its own type, or NULL. */
#define TMS_REAL(state, name) ((tms_##name##_t)tms_hook_real((state), TMS_HOOK_##name))

/* Calls the real function, or logs that there is none. */
#define TMS_CALL_REAL(result, state, name, ...)                                                                             \
    do {                                                                                                                    \
        tms_##name##_t real_function = TMS_REAL((state), name);                                                             \
        (result) =                                                                                                          \
            real_function ? real_function(__VA_ARGS__) : (__typeof__(result))tms_hook_missing((state), TMS_HOOK_##name);    \
    } while (0)

#endif
