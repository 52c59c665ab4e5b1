/* The format of the lists of entry points. Each folder's entries.h lists the driver functions and the runtime functions
 * that the folder implements. control/all_entries.h joins the lists. control/entry.c generates, for each entry, the
 * exported wrapper (counts, trace, fault injection) and its result in cuGetProcAddress.
 *
 * Format: X(exported symbol, implementation, checks, parameters, arguments). Calls are counted under the symbol without
 * its ABI suffix. A wrapper runs the checks and then the implementation, both with the simulator's lock held. The
 * implementation's result is the result of the call; a runtime function also stores it as the thread's last error. */
#ifndef TMS_SIM_BASE_ENTRY_LIST_H
#define TMS_SIM_BASE_ENTRY_LIST_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/base/runtime_types.h"

/* The checks before a call. All except SIM_PURE fail after deinitialisation. */
enum {
    SIM_PURE = 1,      /* does not depend on any state: always works, and a fault on "*" does not apply */
    SIM_INIT = 2,      /* needs cuInit */
    SIM_CONTEXT = 4,   /* needs a current context without a sticky error; includes SIM_INIT */
    SIM_UNSAFE = 8,    /* forbidden during captures, see cuThreadExchangeStreamCaptureMode */
    SIM_DEVICES = 16,  /* runtime: initialises the devices, as cuInit does */
    SIM_RUNTIME = 32,  /* runtime: retains the current device's primary context, which must have no error */
    SIM_HEALTHY = 64,  /* needs no context, but a current context must have no sticky error; includes SIM_INIT */
    SIM_FORKED = 128,  /* also works in a forked child, where the state may be read but not locked */
    SIM_FREEING = 256, /* as SIM_HEALTHY; also fails if the current context was destroyed */
};

/* Declares the implementation that a wrapper calls. */
#define SIM_DECLARE_ENTRY(symbol, implementation, checks, parameters, arguments) CUresult implementation parameters;

#endif
