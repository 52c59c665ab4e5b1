/* Queries of streams, and host functions of the program in stream order. */
#include "simulator/base/runtime_types.h"
#include "simulator/base/state.h"
#include "simulator/streams/entries.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"

CUresult sim_stream_priority(CUstream handle, int *priority) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!priority) return CUDA_ERROR_INVALID_VALUE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult sim_stream_flags(CUstream handle, unsigned int *flags) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = stream->blocking || stream->legacy ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
    return CUDA_SUCCESS;
}

CUresult sim_stream_identifier(CUstream handle, unsigned long long *id) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!id) return CUDA_ERROR_INVALID_VALUE;
    *id = stream->id;
    return CUDA_SUCCESS;
}

CUresult sim_stream_context(CUstream handle, CUcontext *context) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    *context = (CUcontext)(uintptr_t)stream->context->id;
    return CUDA_SUCCESS;
}

CUresult sim_stream_device(CUstream handle, int *device) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = stream->context->device;
    return CUDA_SUCCESS;
}

CUresult sim_stream_host_function(CUstream handle, sim_host_function_t *function, void *argument) {
    const sim_op_t op = {.kind = SIM_OP_HOST, .function = function, .argument = argument};
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    return function ? sim_stream_submit(stream, &op, NULL) : CUDA_ERROR_INVALID_VALUE;
}

/* Unlike cudaLaunchHostFunc, a callback cannot be captured. It runs once, or never if the context fails first. */
CUresult sim_stream_add_callback(CUstream handle, sim_stream_callback_t *callback, void *argument, unsigned int flags) {
    const sim_op_t op = {.kind = SIM_OP_HOST, .callback = callback, .argument = argument};
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_capture_check_stream(stream);
    return result == CUDA_SUCCESS ? sim_stream_submit(stream, &op, NULL) : result;
}
