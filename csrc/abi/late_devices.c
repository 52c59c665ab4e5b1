#include "abi/late_devices.h"

void tms_late_devices_init(tms_late_devices_t *late) {
    *late = (tms_late_devices_t){0};
    pthread_mutex_init(&late->lock, NULL);
}

void tms_late_devices_listen(tms_late_devices_t *late, tms_device_listener_t listener, void *context,
                             tms_device_mask_t mask) {
    pthread_mutex_lock(&late->lock);
    late->listener = listener;
    late->context = context;
    late->uncalled = mask;
    pthread_mutex_unlock(&late->lock);
}

void tms_late_devices_notify(tms_late_devices_t *late, int device) {
    tms_device_mask_t bit = (tms_device_mask_t)1 << device;
    pthread_mutex_lock(&late->lock);
    if (late->listener && (late->uncalled & bit) && late->listener(late->context, device)) late->uncalled &= ~bit;
    pthread_mutex_unlock(&late->lock);
}

void tms_late_devices_after_fork_in_child(tms_late_devices_t *late) { tms_late_devices_init(late); }
