/* Failures as error numbers of the CUDA runtime, for the functions kept for existing programs (compat.c) and for the
 * interposers (preload/hooks.c). The runtime's header is not needed to build this library. Any thread, no lock. */
#ifndef TMS_COMPAT_H
#define TMS_COMPAT_H

#include "include/tms.h"

/* cudaError_t by value. Since CUDA 10.1 the runtime and the driver use the same numbers for the errors they share. */
typedef int tms_cuda_error_t;
enum {
    TMS_CUDA_SUCCESS = 0,
    TMS_CUDA_ERROR_INVALID_VALUE = 1,
    TMS_CUDA_ERROR_MEMORY_ALLOCATION = 2,
    TMS_CUDA_ERROR_INITIALIZATION = 3,
    TMS_CUDA_ERROR_NO_DEVICE = 100,
    TMS_CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302,
    TMS_CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    TMS_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    TMS_CUDA_ERROR_UNKNOWN = 999
};

/* Returns the runtime's error number for this failure. A driver error that has no status of its own keeps its number. */
tms_cuda_error_t tms_compat_cuda_error(tms_status_t status, const tms_error_t *error);

#endif
