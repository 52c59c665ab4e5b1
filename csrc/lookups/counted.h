/* Which functions of the driver are counted, and what a library gets that looks one up.
 *
 * A library that has the CUDA runtime in it (NCCL) finds the driver's functions by dlsym and cuGetProcAddress, where the
 * dynamic linker binds nothing. With TMS_LEDGER=1 it gets our interposer of the function instead (preload/counted_hooks.c),
 * which calls the driver's own. That one is the first that was found; another one of the same library is called through it.
 *
 * Not replaced is what the core looks up, because managed memory is not counted; what the driver itself looks up; and
 * functions that lie in no driver, as those of another interposer do.
 *
 * cuGetProcAddress is here as well, for both ways to find it.
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

/* The functions that stand before the driver's. */
#define TMS_LOOKUPS_DECLARE(name, parameters) TMS_EXPORT CUresult name parameters;
TMS_DRIVER_LOOKUPS(TMS_LOOKUPS_DECLARE)
#undef TMS_LOOKUPS_DECLARE

/* The function with that symbol, or TMS_NOT_COUNTED. Calls nothing. */
int tms_counted_symbol(const char *symbol);

/* Whether lookups from `caller`, an address in the code that asks, are replaced. */
bool tms_counted_for(tms_state_t *state, const void *caller);
/* What to return for the function `found`: the interposer, or `found` where that does not lie in the driver. */
void *tms_counted_replace(tms_state_t *state, tms_hook_t hook, void *found);

#endif
