/* Devices that the process begins to use after it has allocated managed memory. They get access to that memory, and a
 * listener is called.
 *
 * A device's first allocation by torch comes to the entry points in torch_allocator.c, because the listener's owner has
 * routed it there. The state of the process owns this. Any thread; `lock` is held across the listener, which takes no lock
 * of this library, and across no driver call. */
#ifndef TMS_LATE_DEVICES_H
#define TMS_LATE_DEVICES_H

#include <pthread.h>

#include "device/device.h"
#include "include/tms.h"

typedef struct tms_late_devices {
    pthread_mutex_t lock;
    tms_device_listener_t listener;
    void *context;
    tms_device_mask_t uncalled; /* devices for which the listener has yet to be called */
} tms_late_devices_t;

void tms_late_devices_init(tms_late_devices_t *late);
/* Replaces the listener, which is called for the devices of `mask`. NULL: none is called once this returns. */
void tms_late_devices_listen(tms_late_devices_t *late, tms_device_listener_t listener, void *context,
                             tms_device_mask_t mask);
/* Called after torch has allocated on the device. */
void tms_late_devices_notify(tms_late_devices_t *late, int device);
/* Called in a forked child, which has no listener. */
void tms_late_devices_after_fork_in_child(tms_late_devices_t *late);

#endif
