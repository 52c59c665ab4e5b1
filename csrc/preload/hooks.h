/* The interposers, which programs call instead of the functions of resolve.h: hooks.c has the hooks that manage memory and
 * see captures, counted_hooks.c the hooks that only count (count.h), and handle_hooks.c what PyTorch's allocator gets in
 * place of the driver's virtual memory management.
 *
 * A hook only calls the real function if the thread's allocations are not managed, if this thread is already inside a hook,
 * or if the state cannot be created. Loading the library does nothing, and no hook runs before the program calls a CUDA
 * function, so processes without CUDA are not affected.
 *
 * There are two limitations. A hook cannot set the runtime's last error: a failed managed allocation returns its error, but
 * cudaGetLastError() does not report it. No hook is called if a program captures with the driver's functions or with a
 * statically linked runtime. Any thread; no lock of its own. */
#ifndef TMS_PRELOAD_HOOKS_H
#define TMS_PRELOAD_HOOKS_H

#include "resolve.h"

#define TMS_HOOK_DECLARE(name, parameters) TMS_EXPORT tms_cuda_error_t name parameters;
TMS_RUNTIME_HOOKS(TMS_HOOK_DECLARE)
#undef TMS_HOOK_DECLARE
#define TMS_HOOK_DECLARE(name, parameters) TMS_EXPORT CUresult name parameters;
TMS_DRIVER_HOOKS(TMS_HOOK_DECLARE)
#undef TMS_HOOK_DECLARE

/* Whether to return a failure to make managed memory to the program. Otherwise the real function is called: it returns the
 * program's usual error, or memory that is not managed if only managed memory is impossible. */
static inline bool tms_hook_is_final(tms_status_t status) {
    return status == TMS_OUT_OF_DEVICE_MEMORY || status == TMS_OUT_OF_HOST_MEMORY || status == TMS_DRIVER ||
           status == TMS_DEVICE_LOST || status == TMS_CAPTURE_IN_PROGRESS;
}

/* cuMemCreate, called by the code at `caller`. Host memory is not counted. */
CUresult tms_counted_create(const void *caller, CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *properties, unsigned long long flags);

#endif
