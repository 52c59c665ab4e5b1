/* The functions of the CUDA runtime that the preload library stands before, in one X-macro, and how the real ones are found.
 *
 * A hook does the least it can: where the thread's allocations are not managed, where we are already inside a hook on this
 * thread, or where the state cannot be made, it calls the real function and nothing else. No hook runs before the program
 * calls a CUDA function, and loading the library does nothing at all, so processes without CUDA never notice it.
 *
 * The real function is the next one in the search order (RTLD_NEXT); where that finds none (the runtime was opened with
 * RTLD_LOCAL, as Python packages do), the one of the libcudart already loaded. Nothing is ever loaded for it. The result is
 * kept in the state (state.h: real[]). No lock is held across the search. Threads: any. */
#ifndef TMS_PRELOAD_HOOKS_H
#define TMS_PRELOAD_HOOKS_H

#include <cuda.h>

/* cudaError_t by value: the runtime's header is not needed to build this library. */
typedef int tms_cuda_error_t;
enum {
    TMS_CUDA_SUCCESS = 0,
    TMS_CUDA_ERROR_INVALID_VALUE = 1,
    TMS_CUDA_ERROR_MEMORY_ALLOCATION = 2,
    TMS_CUDA_ERROR_INITIALIZATION = 3,
    TMS_CUDA_ERROR_NO_DEVICE = 100,
    TMS_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    TMS_CUDA_ERROR_UNKNOWN = 999,
    TMS_CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302
};

/* X(function, parameter list). Stream and graph handles are pointers. */
#define TMS_HOOKS(X)                                                                                                        \
    X(cudaMalloc, (void **address, size_t bytes))                                                                           \
    X(cudaFree, (void *address))                                                                                            \
    X(cudaDeviceEnablePeerAccess, (int peer, unsigned int flags))                                                           \
    X(cudaStreamBeginCapture, (void *stream, int mode))                                                                     \
    X(cudaStreamBeginCapture_ptsz, (void *stream, int mode))                                                                \
    X(cudaStreamBeginCaptureToGraph,                                                                                        \
      (void *stream, void *graph, const void *dependencies, const void *edges, size_t count, int mode))                     \
    X(cudaStreamBeginCaptureToGraph_ptsz,                                                                                   \
      (void *stream, void *graph, const void *dependencies, const void *edges, size_t count, int mode))                     \
    X(cudaStreamEndCapture, (void *stream, void **graph))                                                                   \
    X(cudaStreamEndCapture_ptsz, (void *stream, void **graph))

typedef enum tms_hook {
#define TMS_HOOK_ENUMERATOR(name, parameters) TMS_HOOK_##name,
    TMS_HOOKS(TMS_HOOK_ENUMERATOR)
#undef TMS_HOOK_ENUMERATOR
        TMS_HOOK_COUNT
} tms_hook_t;

/* The runtime's own function, or NULL. `resolve.c`. */
void *tms_hook_real(tms_hook_t hook);

#endif
