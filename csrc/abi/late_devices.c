#include "abi/late_devices.h"

#include <stdlib.h>

#include "base/thread.h"
#include "device/wait.h"

typedef struct message {
    tms_late_devices_t *late;
    int device;
} message_t;

void tms_late_devices_init(tms_late_devices_t *late) {
    *late = (tms_late_devices_t){0};
    pthread_mutex_init(&late->lock, NULL);
    tms_wait_condition_init(&late->ended);
}

void tms_late_devices_listen(tms_late_devices_t *late, tms_device_listener_t listener, void *context,
                             tms_device_mask_t mask) {
    pthread_mutex_lock(&late->lock);
    late->listener = listener;
    late->context = context;
    late->uncalled = mask;
    pthread_mutex_unlock(&late->lock);
}

static void *call_listener(void *argument) {
    message_t *message = argument;
    tms_late_devices_t *late = message->late;
    pthread_mutex_lock(&late->lock);
    tms_device_listener_t listener = late->listener;
    void *context = late->context;
    pthread_mutex_unlock(&late->lock);
    if (listener) listener(context, message->device);
    free(message);
    pthread_mutex_lock(&late->lock);
    late->running--;
    pthread_cond_broadcast(&late->ended);
    pthread_mutex_unlock(&late->lock);
    return NULL;
}

/* Under the lock. */
static bool start_thread(tms_late_devices_t *late, int device) {
    pthread_t thread;
    message_t *message = malloc(sizeof *message);
    if (!message) return false;
    *message = (message_t){late, device};
    if (tms_thread_start(&thread, call_listener, message) != 0) {
        free(message);
        return false;
    }
    pthread_detach(thread);
    return true;
}

void tms_late_devices_notify(tms_late_devices_t *late, int device) {
    tms_device_mask_t bit = (tms_device_mask_t)1 << device;
    pthread_mutex_lock(&late->lock);
    if (late->listener && (late->uncalled & bit) && start_thread(late, device)) {
        late->uncalled &= ~bit;
        late->running++;
    }
    pthread_mutex_unlock(&late->lock);
}

void tms_late_devices_close(tms_late_devices_t *late, double deadline) {
    pthread_mutex_lock(&late->lock);
    late->listener = NULL;
    while (late->running > 0 && tms_wait_until(&late->ended, &late->lock, deadline)) {
    }
    pthread_mutex_unlock(&late->lock);
}

void tms_late_devices_after_fork_in_child(tms_late_devices_t *late) { tms_late_devices_init(late); }
