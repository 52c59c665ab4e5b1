/* The functions of the CUDA runtime that the preload library stands before, in one X-macro, and how the real ones are found.
 *
 * The real function is the next one in the search order (RTLD_NEXT); where that finds none (the runtime was opened with
 * RTLD_LOCAL, as Python packages do), the one of the libcudart already loaded. Nothing is ever loaded for it. The result is
 * kept in the state (state.h: real[]). No lock is held across the search. Threads: any. */
#ifndef TMS_PRELOAD_RESOLVE_H
#define TMS_PRELOAD_RESOLVE_H

#include <stddef.h>

#include "abi/compat.h"
#include "abi/state.h"

/* X(function, parameter list). Stream and graph handles are pointers. Destroying a stream, or the context that it
 * belongs to, is among them because it ends a capture that is under way there. The functions with the suffix are the ones
 * that programs built for per-thread default streams call. */
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
    X(cudaStreamEndCapture_ptsz, (void *stream, void **graph))                                                              \
    X(cudaStreamDestroy, (void *stream))                                                                                    \
    X(cudaDeviceReset, (void))

typedef enum tms_hook {
#define TMS_HOOK_ENUMERATOR(name, parameters) TMS_HOOK_##name,
    TMS_HOOKS(TMS_HOOK_ENUMERATOR)
#undef TMS_HOOK_ENUMERATOR
        TMS_HOOK_COUNT
} tms_hook_t;
_Static_assert((int)TMS_HOOK_COUNT <= (int)TMS_MAX_HOOKS, "the state has too little room for the runtime's functions");

/* The type of each: tms_cudaMalloc_t. */
#define TMS_HOOK_TYPE(name, parameters) typedef tms_cuda_error_t(*tms_##name##_t) parameters;
TMS_HOOKS(TMS_HOOK_TYPE)
#undef TMS_HOOK_TYPE

/* A function of any type; cast it to its own before calling. */
typedef void (*tms_hook_function_t)(void);

const char *tms_hook_name(tms_hook_t hook);

/* The runtime's own function, or NULL where the process has none. `state` may be NULL: then nothing is remembered. */
tms_hook_function_t tms_hook_real(tms_state_t *state, tms_hook_t hook);

#endif
