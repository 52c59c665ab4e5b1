/* Every exported entry point once, in the format of base/entry_list.h, and its number. */
#ifndef TMS_SIM_CONTROL_ALL_ENTRIES_H
#define TMS_SIM_CONTROL_ALL_ENTRIES_H

#include "simulator/contexts/entries.h"
#include "simulator/control/entries.h"
#include "simulator/devices/entries.h"
#include "simulator/graphs/entries.h"
#include "simulator/memory/entries.h"
#include "simulator/nccl/entries.h"
#include "simulator/runtime/entries.h"
#include "simulator/streams/entries.h"

#define SIM_DRIVER_ENTRIES(X)                                                                                               \
    SIM_DEVICES_DRIVER_ENTRIES(X)                                                                                           \
    SIM_MEMORY_DRIVER_ENTRIES(X)                                                                                            \
    SIM_STREAMS_DRIVER_ENTRIES(X)                                                                                           \
    SIM_GRAPHS_DRIVER_ENTRIES(X)                                                                                            \
    SIM_CONTEXTS_DRIVER_ENTRIES(X)                                                                                          \
    SIM_RUNTIME_DRIVER_ENTRIES(X)                                                                                           \
    SIM_CONTROL_DRIVER_ENTRIES(X)

#define SIM_RUNTIME_ENTRIES(X)                                                                                              \
    SIM_DEVICES_RUNTIME_ENTRIES(X)                                                                                          \
    SIM_STREAMS_RUNTIME_ENTRIES(X)                                                                                          \
    SIM_GRAPHS_RUNTIME_ENTRIES(X)                                                                                           \
    SIM_CONTEXTS_RUNTIME_ENTRIES(X)                                                                                         \
    SIM_RUNTIME_RUNTIME_ENTRIES(X)                                                                                          \
    SIM_CONTROL_RUNTIME_ENTRIES(X)

typedef enum sim_call {
#define SIM_CALL_ENUMERATOR(symbol, implementation, checks, parameters, arguments) SIM_CALL_##symbol,
    SIM_DRIVER_ENTRIES(SIM_CALL_ENUMERATOR) SIM_RUNTIME_ENTRIES(SIM_CALL_ENUMERATOR) SIM_NCCL_ENTRIES(SIM_CALL_ENUMERATOR)
#undef SIM_CALL_ENUMERATOR
        SIM_CALL_COUNT
} sim_call_t;

#endif
