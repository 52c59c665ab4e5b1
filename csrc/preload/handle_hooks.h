/* The functions that PyTorch's allocator receives instead of the driver's virtual memory management functions. They manage
 * the memory of its expandable segments (core/allocation/handles.h).
 *
 * libc10_cuda, which has the allocator, looks these functions up with cudaGetDriverEntryPoint. PyTorch's other libraries use
 * the same table of functions for memory of their own (symmetric memory, for example). So a call manages memory only if its
 * return address lies in libc10_cuda, and if the calling thread's region manages it, as for cudaMalloc. Every function takes
 * handles of ours and the driver's own.
 *
 * PyTorch's allocator holds its mutex during these calls, and the calling thread may hold the GIL.
 *
 * Any thread; no lock of its own. */
#ifndef TMS_PRELOAD_HANDLE_HOOKS_H
#define TMS_PRELOAD_HANDLE_HOOKS_H

#include "hooks.h"

/* Returns the function to use in place of `found`, which is the driver's function with that name, for the code at `caller`.
 */
void *tms_handle_hooks_replace(tms_state_t *state, const void *caller, const char *symbol, void *found);

#endif
