/* What a list of entry points looks like. Each folder's entries.h has one of the driver's functions and one of the runtime's
 * that the folder implements; control/all_entries.h puts them together, and control/entry.c makes of each entry the exported
 * wrapper that counts, traces and injects faults, and the answer of cuGetProcAddress.
 *
 * X(exported symbol, implementation, checks, parameters, arguments). The name that counts is the symbol without its ABI
 * suffix. Implementations run with the simulator's lock held, after the checks; what they return is the call's result, and
 * in a runtime function the thread's last error. */
#ifndef TMS_SIM_BASE_ENTRY_LIST_H
#define TMS_SIM_BASE_ENTRY_LIST_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/base/runtime_types.h"

/* The checks before a call; every one but SIM_PURE fails after deinitialisation. */
enum {
    SIM_PURE = 1,      /* looks at nothing: works always, and "*" does not fail it */
    SIM_INIT = 2,      /* needs cuInit */
    SIM_CONTEXT = 4,   /* needs a current context without a sticky error; includes SIM_INIT */
    SIM_UNSAFE = 8,    /* forbidden during captures, as cuThreadExchangeStreamCaptureMode says */
    SIM_DEVICES = 16,  /* of the runtime: needs what cuInit makes, and makes it */
    SIM_RUNTIME = 32,  /* of the runtime: makes the current device's primary context, and needs it without error */
    SIM_HEALTHY = 64,  /* needs no context, but if one is current, it must be without a sticky error; includes SIM_INIT */
    SIM_FORKED = 128,  /* works in a forked child, too, where the state may be looked at but not locked */
    SIM_FREEING = 256, /* as SIM_HEALTHY, and a current context must not have been destroyed */
};

/* What the wrappers call. */
#define SIM_DECLARE_ENTRY(symbol, implementation, checks, parameters, arguments) CUresult implementation parameters;

#endif
