/* The part of cuBLAS that PyTorch uses to prepare a call: handles, and the stream and workspace of each. PyTorch allocates
 * the workspace. So the workspaces of PyTorch's simulated matrix products come from PyTorch's own code, and lie where they
 * would lie on a GPU. The functions that compute are not simulated: PyTorch's operators run in the device process. A handle
 * belongs to one thread at a time, as in cuBLAS, so it has no lock. */
#include <stdlib.h>

#include "simulator/simulator.h"

enum { STATUS_SUCCESS = 0, STATUS_NOT_INITIALIZED = 1, STATUS_ALLOC_FAILED = 3, STATUS_INVALID_VALUE = 7 };

/* The object of a cublasHandle_t. */
typedef struct blas_handle {
    void *stream;
    tms_sim_operand_t workspace;
} blas_handle_t;

TMS_SIM_EXPORT int cublasCreate_v2(blas_handle_t **handle);
TMS_SIM_EXPORT int cublasDestroy_v2(blas_handle_t *handle);
TMS_SIM_EXPORT int cublasSetStream_v2(blas_handle_t *handle, void *stream);
TMS_SIM_EXPORT int cublasSetWorkspace_v2(blas_handle_t *handle, void *workspace, size_t bytes);
TMS_SIM_EXPORT int cublasSetMathMode(blas_handle_t *handle, int mode);

int cublasCreate_v2(blas_handle_t **handle) {
    if (!handle) return STATUS_INVALID_VALUE;
    *handle = calloc(1, sizeof **handle);
    return *handle ? STATUS_SUCCESS : STATUS_ALLOC_FAILED;
}

int cublasDestroy_v2(blas_handle_t *handle) {
    free(handle);
    return STATUS_SUCCESS;
}

/* As in cuBLAS, the handle loses its workspace. */
int cublasSetStream_v2(blas_handle_t *handle, void *stream) {
    if (!handle) return STATUS_NOT_INITIALIZED;
    *handle = (blas_handle_t){.stream = stream};
    return STATUS_SUCCESS;
}

int cublasSetWorkspace_v2(blas_handle_t *handle, void *workspace, size_t bytes) {
    if (!handle) return STATUS_NOT_INITIALIZED;
    handle->workspace = (tms_sim_operand_t){.address = (uint64_t)(uintptr_t)workspace, .bytes = bytes, .written = 1};
    return STATUS_SUCCESS;
}

int cublasSetMathMode(blas_handle_t *handle, int mode) {
    (void)mode;
    return handle ? STATUS_SUCCESS : STATUS_NOT_INITIALIZED;
}

tms_sim_operand_t tms_sim_blas_workspace(const void *handle) { return ((const blas_handle_t *)handle)->workspace; }
