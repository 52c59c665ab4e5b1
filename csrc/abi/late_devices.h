/* Devices that the process begins to use after it has allocated managed memory. They get access to that memory, and a
 * listener is called.
 *
 * A device's first allocation by torch comes to the entry points in torch_allocator.c, because the listener's owner has
 * routed it there. torch holds that device's allocator mutex then, perhaps with the GIL, so the listener runs on a thread of
 * its own. It is called at most once for each device. The state of the process owns this. Any thread; `lock` is a leaf and
 * is held neither across the listener nor across a driver call. */
#ifndef TMS_LATE_DEVICES_H
#define TMS_LATE_DEVICES_H

#include <pthread.h>

#include "device/device.h"
#include "include/tms.h"

typedef struct tms_late_devices {
    pthread_mutex_t lock;
    pthread_cond_t ended; /* `running` became smaller */
    tms_device_listener_t listener;
    void *context;
    tms_device_mask_t uncalled; /* devices for which the listener has yet to be called */
    int running;                /* threads that have not returned from the listener */
} tms_late_devices_t;

void tms_late_devices_init(tms_late_devices_t *late);
/* Replaces the listener, which is called for the devices of `mask`. */
void tms_late_devices_listen(tms_late_devices_t *late, tms_device_listener_t listener, void *context,
                             tms_device_mask_t mask);
/* Called after torch has allocated on the device. If no thread can be started, the next call for the device tries again. */
void tms_late_devices_notify(tms_late_devices_t *late, int device);
/* Removes the listener, and waits until it has returned or the deadline (tms_wait_now) has passed. */
void tms_late_devices_close(tms_late_devices_t *late, double deadline);
/* Called in a forked child, which has no listener. */
void tms_late_devices_after_fork_in_child(tms_late_devices_t *late);

#endif
