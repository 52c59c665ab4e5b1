/* Decides which functions of the driver are counted, and what a library gets when it looks one up.
 *
 * A library that contains the CUDA runtime (NCCL) finds the driver's functions by dlsym and cuGetProcAddress, where the
 * dynamic linker binds nothing. With TMS_LEDGER=1 it gets our interposer of the function instead (preload/counted_hooks.c),
 * which calls the driver's own function. It calls the function that was found first, even if a later look-up finds another
 * address in the same library.
 *
 * Three kinds of look-ups are not replaced: look-ups by the core, because managed memory is not counted; look-ups by the
 * driver itself; and functions that do not lie in the driver, such as those of another interposer.
 *
 * cuGetProcAddress is interposed as well, for both ways to find it.
 *
 * Any thread. No lock; the loader is asked with dl_iterate_phdr only, so no thread waits for one that loads a library. */
#ifndef TMS_LOOKUPS_COUNTED_H
#define TMS_LOOKUPS_COUNTED_H

#include "preload/resolve.h"

/* For code that runs before a sanitizer or a profiler has started, in the first malloc of a process for instance. */
#if defined(__clang__)
#define TMS_LOOKUPS_EARLY __attribute__((no_sanitize("address", "undefined", "thread")))
#else
#define TMS_LOOKUPS_EARLY __attribute__((no_sanitize("address", "undefined", "thread"), no_profile_instrument_function))
#endif

enum { TMS_NOT_COUNTED = -1 };

/* The functions that interpose the driver's look-up functions. */
#define TMS_LOOKUPS_DECLARE(name, parameters) TMS_EXPORT CUresult name parameters;
TMS_DRIVER_LOOKUPS(TMS_LOOKUPS_DECLARE)
#undef TMS_LOOKUPS_DECLARE

/* Returns the hook of the function with that symbol, or TMS_NOT_COUNTED. Calls no other function. */
int tms_counted_symbol(const char *symbol);

/* Whether lookups from `caller`, an address in the code that asks, are replaced. */
bool tms_counted_for(tms_state_t *state, const void *caller);
/* Returns the function to use in place of `found`: the interposer, or `found` itself if it does not lie in the driver. */
void *tms_counted_replace(tms_state_t *state, tms_hook_t hook, void *found);

#endif
