/* Every exported entry point, once: the wrapper that counts, traces and injects faults (entry.c), the declaration of what it
 * calls, and the answer of cuGetProcAddress are made from these lists.
 *
 * X(exported symbol, implementation, checks, parameters, arguments). The name that counts is the symbol without its ABI
 * suffix. Implementations run with the simulator's lock held, after the checks. */
#ifndef TMS_SIM_ENTRIES_H
#define TMS_SIM_ENTRIES_H

#include <cuda.h>
#include <stdint.h>

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

#include "sim_entries_driver.h"
#include "sim_entries_kernel.h"
#include "sim_entries_runtime.h"

typedef enum sim_call {
#define SIM_CALL_ENUMERATOR(symbol, implementation, checks, parameters, arguments) SIM_CALL_##symbol,
    SIM_DRIVER_ENTRIES(SIM_CALL_ENUMERATOR) SIM_RUNTIME_ENTRIES(SIM_CALL_ENUMERATOR) SIM_KERNEL_ENTRIES(SIM_CALL_ENUMERATOR)
#undef SIM_CALL_ENUMERATOR
        SIM_CALL_COUNT
} sim_call_t;

/* What the wrappers call. */
#define SIM_DECLARE(symbol, implementation, checks, parameters, arguments) CUresult implementation parameters;
SIM_DRIVER_ENTRIES(SIM_DECLARE)
#undef SIM_DECLARE
#define SIM_DECLARE_RUNTIME(symbol, implementation, checks, parameters, arguments) CUresult implementation parameters;
SIM_RUNTIME_ENTRIES(SIM_DECLARE_RUNTIME)
SIM_KERNEL_ENTRIES(SIM_DECLARE_RUNTIME)
#undef SIM_DECLARE_RUNTIME

#endif
