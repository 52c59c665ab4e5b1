/* The interposers: what programs call in place of the functions of resolve.h.
 *
 * A hook does the least it can: where the thread's allocations are not managed, where we are already inside a hook on this
 * thread, or where the state cannot be made, it calls the real function and nothing else. No hook runs before the program
 * calls a CUDA function, and loading the library does nothing at all, so processes without CUDA never notice it.
 *
 * Two things differ from the real functions. The runtime's record of its last error is not ours to set: an allocation of
 * ours that fails returns its error, and cudaGetLastError() does not know of it. And where a program captures with the
 * driver's functions, or with a runtime that is linked into it statically, no hook is called. Threads: any. */
#ifndef TMS_PRELOAD_HOOKS_H
#define TMS_PRELOAD_HOOKS_H

#include "resolve.h"

#define TMS_HOOK_DECLARE(name, parameters) TMS_EXPORT tms_cuda_error_t name parameters;
TMS_HOOKS(TMS_HOOK_DECLARE)
#undef TMS_HOOK_DECLARE

#endif
