/* The devices: their number, the ones in use, and peer access between them; entering their primary contexts.
 *
 * A device is in use if its primary context is active (cuDevicePrimaryCtxGetState, which creates nothing). Contexts are
 * retained only for one operation, so cudaDeviceReset keeps its meaning. Push and pop restore the calling thread's current
 * context. The device table is read once, at the first use of the driver, and constant afterwards. Any thread, no lock. */
#ifndef TMS_DEVICE_H
#define TMS_DEVICE_H

#include <stdbool.h>

#include "device/driver.h"

enum { TMS_MAX_DEVICES = 64 };
_Static_assert(TMS_LOG_DEVICES == 1 + TMS_MAX_DEVICES, "the log tells all devices apart");
typedef uint64_t tms_device_mask_t; /* bit d: device of ordinal d */

typedef struct tms_device {
    CUdevice handle;
    size_t granularity; /* of physical allocations, in bytes; 0 if the device has no virtual memory management */
    uint64_t total_bytes;
    bool rdma_capable; /* memory mapped by us can be registered for GPUDirect RDMA */
    bool exportable;   /* memory created by us can be exported as a file descriptor */
} tms_device_t;

typedef struct tms_device_table {
    int count;
    tms_device_t device[TMS_MAX_DEVICES];
} tms_device_table_t;

typedef struct tms_devices {
    tms_driver_t *driver;
    _Atomic(const tms_device_table_t *) table; /* NULL until first use */
    /* Peer access, queried when a second device comes into use: bit p of reachable[d] is valid if bit p of queried[d] is
     * set. */
    _Atomic tms_device_mask_t queried[TMS_MAX_DEVICES], reachable[TMS_MAX_DEVICES];
    _Atomic uint32_t unreleased[TMS_MAX_DEVICES]; /* references to primary contexts that the driver failed to release */
    _Atomic int helpers;               /* helper threads of wait.c; helpers of cancelled calls still use this struct */
    _Atomic bool warned_other_context; /* the warning about a context that is not primary has been logged */
} tms_devices_t;

void tms_devices_init(tms_devices_t *devices, tms_driver_t *driver);
void tms_devices_release(tms_devices_t *devices); /* waits for the helpers of cancelled calls */

/* The driver and the devices, loaded at first use. TMS_DRIVER_UNAVAILABLE if there is no driver or no device. */
tms_status_t tms_devices_load(tms_devices_t *devices, const tms_driver_table_t **driver, const tms_device_table_t **table,
                              const tms_error_context_t *context, tms_error_t *error);

/* TMS_INVALID_ARGUMENT if the device of the context does not exist. */
tms_status_t tms_devices_check(const tms_device_table_t *table, const tms_error_context_t *context, tms_error_t *error);

/* The devices whose primary context is active. Costs one cheap driver call for each device. */
tms_status_t tms_devices_active(tms_devices_t *devices, tms_device_mask_t *mask, const tms_error_context_t *context,
                                tms_error_t *error);

/* The devices that get access to memory of `owner`: the other active devices that can reach it. Makes no driver call on a
 * machine with one device. */
tms_status_t tms_devices_peers(tms_devices_t *devices, int owner, tms_device_mask_t *peers,
                               const tms_error_context_t *context, tms_error_t *error);
/* All devices, except for those that are known to be unable to reach memory of `owner`. Makes no driver call. */
tms_device_mask_t tms_devices_may_reach(tms_devices_t *devices, int owner);

/* The ordinal of the calling thread's current device; 0 if it has no context. */
tms_status_t tms_devices_current(tms_devices_t *devices, int *ordinal, const tms_error_context_t *context,
                                 tms_error_t *error);

/* The free and total memory of a device. Called at every region entry, so it does not enter the context of the thread's
 * current device. */
tms_status_t tms_devices_memory(tms_devices_t *devices, int ordinal, uint64_t *free_bytes, uint64_t *total_bytes,
                                const tms_error_context_t *context, tms_error_t *error);

/* Makes a device's primary context current for a few calls, with the thread's capture mode relaxed (capture_mode.h), and
 * undoes that. A failure to undo is logged and retried: a context left on the thread's stack at the thread's next enter or
 * leave, or by tms_devices_settle; a reference by tms_devices_reclaim. */
tms_status_t tms_devices_enter(tms_devices_t *devices, int ordinal, const tms_error_context_t *context, tms_error_t *error);
void tms_devices_leave(tms_devices_t *devices, int ordinal);

/* Make any context that the program keeps alive current, and undo that. The capture mode does not change. */
tms_status_t tms_devices_push(tms_devices_t *devices, CUcontext pushed_context, const tms_error_context_t *context,
                              tms_error_t *error);
void tms_devices_pop(tms_devices_t *devices, const tms_error_context_t *context);

/* Retries to pop contexts left on this thread's stack. Cheap when there are none. */
void tms_devices_settle(tms_devices_t *devices);
/* Retries to release references to primary contexts. Cheap when there are none. */
void tms_devices_reclaim(tms_devices_t *devices);
/* Returns the number of references that are not released yet. */
uint64_t tms_devices_unreleased(const tms_devices_t *devices);
/* In a forked child: forgets the references and the helpers, which belong to the parent. */
void tms_devices_after_fork_in_child(tms_devices_t *devices);

/* Writes a UUID as NVML and nvidia-smi do: "GPU-5d5ba0d6-...". */
void tms_device_write_uuid(const CUuuid *uuid, char text[TMS_UUID_BYTES]);

#endif
