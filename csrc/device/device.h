/* The devices: how many, which this process uses, which can access which; entering their primary contexts.
 *
 * "Used" means that the primary context is active: cuDevicePrimaryCtxGetState tells so without creating anything. Contexts
 * are retained only for the length of one operation, so cudaDeviceReset keeps its meaning; the calling thread's current
 * context is restored by push and pop. Topology is read once, at the first use of the driver, and constant after. Any
 * thread, no lock. */
#ifndef TMS_DEVICE_H
#define TMS_DEVICE_H

#include <stdbool.h>

#include "device/driver.h"

enum { TMS_MAX_DEVICES = 64 };
_Static_assert(TMS_LOG_DEVICES == 1 + TMS_MAX_DEVICES, "the log tells all devices apart");
typedef uint64_t tms_device_mask_t; /* bit d: device of ordinal d */

typedef struct tms_device {
    CUdevice handle;
    size_t granularity; /* of physical allocations, bytes; 0 where the device has no virtual memory management */
    uint64_t total_bytes;
    bool rdma_capable; /* memory mapped by us can be registered for GPUDirect RDMA */
} tms_device_t;

typedef struct tms_device_table {
    int count;
    tms_device_t device[TMS_MAX_DEVICES];
} tms_device_table_t;

typedef struct tms_devices {
    tms_driver_t *driver;
    _Atomic(const tms_device_table_t *) table; /* NULL until first use */
    /* Which devices can access which, asked when a second one comes into use: bit p of reachable[d] is valid where asked[d]
     * has it. */
    _Atomic tms_device_mask_t asked[TMS_MAX_DEVICES], reachable[TMS_MAX_DEVICES];
    _Atomic uint32_t unreleased[TMS_MAX_DEVICES]; /* references to primary contexts that the driver refused to take back */
    _Atomic int helpers; /* threads of wait.c that wait for devices; those of cancelled calls still use this struct */
    _Atomic bool warned_other_context; /* a wait met a context that is no primary one: one log line is enough */
} tms_devices_t;

void tms_devices_init(tms_devices_t *devices, tms_driver_t *driver);
void tms_devices_release(tms_devices_t *devices); /* waits for the helpers of cancelled calls */

/* The driver and the devices, loaded if need be. TMS_DRIVER_UNAVAILABLE where there is no device or none with VMM. */
tms_status_t tms_devices_load(tms_devices_t *devices, const tms_driver_table_t **driver, const tms_device_table_t **table,
                              const tms_error_context_t *context, tms_error_t *error);

/* The devices whose primary context is active. Costs one cheap driver call a device. */
tms_status_t tms_devices_active(tms_devices_t *devices, tms_device_mask_t *mask, const tms_error_context_t *context,
                                tms_error_t *error);

/* Which devices other than `owner` are to have access to its memory: active ones that can reach it. No driver call on a
 * machine with one device. */
tms_status_t tms_devices_peers(tms_devices_t *devices, int owner, tms_device_mask_t *peers,
                               const tms_error_context_t *context, tms_error_t *error);

/* The ordinal of the calling thread's current device; 0 where it has no context. */
tms_status_t tms_devices_current(tms_devices_t *devices, int *ordinal, const tms_error_context_t *context,
                                 tms_error_t *error);

/* How much of a device's memory is free now, and how much there is. Asked at every region entry: where the device is the
 * thread's current one its context need not be entered. */
tms_status_t tms_devices_memory(tms_devices_t *devices, int ordinal, uint64_t *free_bytes, uint64_t *total_bytes,
                                const tms_error_context_t *context, tms_error_t *error);

/* Makes a device's primary context current for a few calls, with the thread's capture mode relaxed (capture_mode.h), and
 * undoes that. What the driver refuses to undo is logged and tried again: a context left on the thread's stack when this
 * thread enters or leaves again, or by tms_devices_settle; a reference by tms_devices_reclaim. */
tms_status_t tms_devices_enter(tms_devices_t *devices, int ordinal, const tms_error_context_t *context, tms_error_t *error);
void tms_devices_leave(tms_devices_t *devices, int ordinal);

/* What those do on the thread's stack of contexts, for a context that the program keeps alive. */
tms_status_t tms_devices_push(tms_devices_t *devices, CUcontext pushed_context, const tms_error_context_t *context,
                              tms_error_t *error);
void tms_devices_pop(tms_devices_t *devices, const tms_error_context_t *context);

/* Tries again to take off this thread's stack what was left on it. Cheap when there is nothing. */
void tms_devices_settle(tms_devices_t *devices);
/* Tries again to give back references to primary contexts. Cheap when there are none. */
void tms_devices_reclaim(tms_devices_t *devices);
/* How many references wait for that. */
uint64_t tms_devices_unreleased(const tms_devices_t *devices);
/* In a forked child: those, and the helpers, are the parent's. */
void tms_devices_after_fork_in_child(tms_devices_t *devices);

#endif
