/* The interposed functions of the CUDA runtime, in one X-macro, and the search for the real ones.
 *
 * The real function is the next one in the search order (RTLD_NEXT). If there is none (Python packages open the runtime with
 * RTLD_LOCAL), it is that of the libcudart already loaded. The search loads no library. The state keeps the result (state.h:
 * real[]). Any thread; no lock is held during the search. */
#ifndef TMS_PRELOAD_RESOLVE_H
#define TMS_PRELOAD_RESOLVE_H

#include <stddef.h>

#include "abi/compat.h"
#include "abi/state.h"

/* X(function, parameter list). Stream and graph handles are pointers. The functions that destroy a stream or its context are
 * interposed because they end an active capture. Programs built for per-thread default streams call the functions with the
 * suffix. */
#define TMS_HOOKS(X)                                                                                                        \
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

/* A function of any type; cast it to its own type before the call. */
typedef void (*tms_hook_function_t)(void);

const char *tms_hook_name(tms_hook_t hook);

/* The runtime's function, or NULL if the process has none. `state` may be NULL: the result is not kept then. */
tms_hook_function_t tms_hook_real(tms_state_t *state, tms_hook_t hook);

#endif
