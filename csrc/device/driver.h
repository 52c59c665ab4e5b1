/* The CUDA driver: the table of the entry points in use, resolved from a library that is loaded on first use.
 *
 * Nothing is loaded, and no GPU used, before tms_driver_load. The complete table is published atomically and never changes.
 * A failed load leaves nothing behind, and the next call retries it. Any thread; no lock is held across dlopen and dlsym.
 * Two threads may load at once; the first to finish publishes its table. An entry point that the library lacks is NULL in
 * the table; TMS_DRIVER_CALL then returns an error that names it.
 *
 * To add an entry point: a row below, and one in the entries.h of the simulator's folder that does what the call does
 * (csrc/simulator, such as contexts/entries.h), without which the simulated driver lacks it. */
#ifndef TMS_DRIVER_H
#define TMS_DRIVER_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/log.h"
#include "base/status.h"

struct CUmemcpyAttributes_st; /* in cuda.h since CUDA 12.8 */
/* The layout of CUmemcpyAttributes_st. */
typedef struct tms_copy_attributes {
    int source_order;                       /* TMS_IN_STREAM_ORDER */
    CUmemLocation source_hint, target_hint; /* for managed memory only; unused */
    unsigned int flags;
} tms_copy_attributes_t;
enum { TMS_IN_STREAM_ORDER = 1 }; /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM */

/* Each row is X(field and base name, symbol in the library, parameter list). Symbols carry their ABI version, which CUDA 12
 * and 13 drivers share; names are spelled out because cuda.h's macros differ between toolkits. */
#define TMS_DRIVER_ENTRY_POINTS(X)                                                                                          \
    X(cuInit, "cuInit", (unsigned int flags))                                                                               \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                                             \
    X(cuGetErrorName, "cuGetErrorName", (CUresult result, const char **name))                                               \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                                                   \
    X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                                                         \
    X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, CUdevice device))                                            \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, CUdevice_attribute attribute, CUdevice device))            \
    X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *can, CUdevice device, CUdevice peer))                           \
    X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (CUuuid * uuid, CUdevice device))                                              \
    X(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", (CUdevice device, unsigned int *flags, int *active))        \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))                         \
    X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                                         \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext * context))                                                            \
    X(cuCtxGetDevice, "cuCtxGetDevice", (CUdevice * device))                                                                \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                                                         \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))                                                         \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                                         \
    X(cuCtxGetId, "cuCtxGetId", (CUcontext context, unsigned long long *identifier)) /* since CUDA 12 */                    \
    X(cuStreamGetCtx, "cuStreamGetCtx", (CUstream stream, CUcontext * context))                                             \
    X(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream stream, CUstreamCaptureStatus * status))                        \
    X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (CUstreamCaptureMode * mode))                 \
    X(cuStreamCreate, "cuStreamCreate", (CUstream * stream, unsigned int flags))                                            \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                                             \
    X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                                        \
    X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned int flags))                                                \
    X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                                                     \
    X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                                                            \
    X(cuEventQuery, "cuEventQuery", (CUevent event))                                                                        \
    X(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                                                                 \
    X(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream stream, CUevent event, unsigned int flags))                         \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t *free_bytes, size_t *total_bytes))                                           \
    X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * address, size_t size))                                                    \
    X(cuMemFree, "cuMemFree_v2", (CUdeviceptr address))                                                                     \
    X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                                                       \
      (size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option))                      \
    X(cuMemAddressReserve, "cuMemAddressReserve",                                                                           \
      (CUdeviceptr * address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags))                   \
    X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr address, size_t size))                                             \
    X(cuMemCreate, "cuMemCreate",                                                                                           \
      (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags))      \
    X(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle handle))                                                  \
    X(cuMemMap, "cuMemMap",                                                                                                 \
      (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))     \
    X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr address, size_t size))                                                         \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                                         \
      (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags))     \
    X(cuMemSetAccess, "cuMemSetAccess", (CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count))      \
    X(cuMemGetAccess, "cuMemGetAccess", (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address))    \
    X(cuMemHostRegister, "cuMemHostRegister_v2", (void *host, size_t size, unsigned int flags))                             \
    X(cuMemHostUnregister, "cuMemHostUnregister", (void *host))                                                             \
    X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (CUdeviceptr * address, void *host, unsigned int flags))   \
    X(cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void *image))                                         \
    X(cuModuleUnload, "cuModuleUnload", (CUmodule module))                                                                  \
    X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction * function, CUmodule module, const char *name))               \
    X(cuModuleGetGlobal, "cuModuleGetGlobal_v2", (CUdeviceptr * address, size_t *bytes, CUmodule module, const char *name)) \
    X(cuLaunchKernel, "cuLaunchKernel",                                                                                     \
      (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,            \
       unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters,           \
       void **extra))                                                                                                       \
    X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr device, unsigned char value, size_t size, CUstream stream))          \
    X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *host, CUdeviceptr device, size_t size, CUstream stream))            \
    X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr device, const void *host, size_t size, CUstream stream))      \
    X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream))    \
    X(cuMemcpyBatchAsync, "cuMemcpyBatchAsync_v2", /* since CUDA 13 */                                                      \
      (CUdeviceptr * targets, CUdeviceptr * sources, size_t *sizes, size_t count, struct CUmemcpyAttributes_st *attributes, \
       size_t *first_copies, size_t attribute_count, CUstream stream))

typedef struct tms_driver_table {
#define TMS_DRIVER_FIELD(name, symbol, parameters) CUresult(*name) parameters;
    TMS_DRIVER_ENTRY_POINTS(TMS_DRIVER_FIELD)
#undef TMS_DRIVER_FIELD
} tms_driver_table_t;

typedef struct tms_driver {
    const char *path; /* the library to load; owned by the configuration */
    tms_log_t *log;
    _Atomic(const tms_driver_table_t *) table; /* NULL until loaded and cuInit has succeeded */
} tms_driver_t;

void tms_driver_init(tms_driver_t *driver, const char *path, tms_log_t *log);
/* For tests that create several: frees the table; the library stays loaded. */
void tms_driver_release(tms_driver_t *driver);

/* Loads the library, resolves the table and calls cuInit, once; later calls cost one atomic load. Fails with
 * TMS_DRIVER_UNAVAILABLE naming the path and dlerror, or cuInit's result, or "too old" where cuMemCreate is missing. */
tms_status_t tms_driver_load(tms_driver_t *driver, const tms_driver_table_t **table, const tms_error_context_t *context,
                             tms_error_t *error);

/* Returns the name of a result for a message, such as "CUDA_ERROR_OUT_OF_MEMORY", or NULL. */
const char *tms_driver_result_name(const tms_driver_table_t *table, CUresult result);

/* Fills *error for a failed or missing call. Used through the macro below. */
tms_status_t tms_driver_fail(const tms_driver_table_t *table, const tms_error_context_t *context, const char *call,
                             CUresult result, tms_error_t *error);

/* Whether a call failed because the driver has shut down, as it does at process exit. It has released everything then. */
static inline bool tms_driver_is_gone(const tms_error_t *error) {
    return error->driver_result == CUDA_ERROR_DEINITIALIZED || error->driver_result == CUDA_ERROR_NOT_INITIALIZED;
}

/* Whether the driver released an object, or has shut down and released everything, so that no retry is needed. A driver that
 * lacks the call counts as one that fails it. */
#define TMS_RELEASED(table, name, held) ((table)->name && tms_driver_has_released((table)->name(held)))

static inline bool tms_driver_has_released(CUresult result) {
    return result == CUDA_SUCCESS || tms_status_from_driver(result) == TMS_DRIVER_UNAVAILABLE;
}

/* A call that undoes a change is retried at once: it may report the asynchronous error of an earlier call. */
enum { TMS_UNDO_ATTEMPTS = 3 };

static inline bool tms_is_default_stream(const void *stream) {
    return !stream || stream == (void *)CU_STREAM_LEGACY || stream == (void *)CU_STREAM_PER_THREAD;
}

/* Calls an entry point; evaluates to a status and fills *error on failure. `table->name` may be missing. */
#define TMS_DRIVER_CALL(table, context, error, name, ...)                                                                   \
    tms_driver_check((table), (context), #name, (table)->name ? (table)->name(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND, (error))

static inline tms_status_t tms_driver_check(const tms_driver_table_t *table, const tms_error_context_t *context,
                                            const char *call, CUresult result, tms_error_t *error) {
    return __builtin_expect(result == CUDA_SUCCESS, 1) ? TMS_OK : tms_driver_fail(table, context, call, result, error);
}

#endif
