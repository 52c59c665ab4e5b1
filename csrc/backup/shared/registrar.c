#include "backup/shared/registrar.h"

#include "backup/shared/object.h"
#include "base/thread.h"
#include "device/wait.h"

/* ---- one object ---- */

/* Whether the driver is to be called for the object now. */
static bool has_work(const tms_shared_store_t *store, const tms_shared_object_t *object) {
    if (!object->memory || object->busy) return false;
    if (object->registered) return object->registration_users == 0 && !object->stuck;
    return object->registration_users > 0 && !store->refuses;
}

static tms_shared_object_t *find_work(const tms_shared_store_t *store) {
    tms_shared_object_t *object = store->closing || store->in_call ? NULL : store->objects;
    while (object && !has_work(store, object)) object = object->next;
    return object;
}

/* Waits with a registration until other replicas have released their memory. Called and returns with the lock held. */
static tms_shared_object_t *next_work(tms_shared_store_t *store) {
    tms_shared_object_t *object = find_work(store);
    while (object && !object->registered && tms_wait_until(&store->changed, &store->lock, store->quiet_until))
        object = find_work(store);
    return object;
}

static tms_status_t change(const tms_shared_store_t *store, const tms_shared_object_t *object, tms_error_t *error) {
    const tms_error_context_t context = {.operation = object->registered ? "end a registration" : "register",
                                         .device = object->device,
                                         .bytes = object->bytes};
    const tms_driver_table_t *driver = NULL;
    void *memory = (void *)(uintptr_t)object->memory;
    tms_status_t status = tms_devices_load(store->copying->devices, &driver, NULL, &context, error);
    if (status == TMS_OK) status = tms_devices_enter(store->copying->devices, object->device, &context, error);
    if (status != TMS_OK) return status;
    if (object->registered)
        status = TMS_DRIVER_CALL(driver, &context, error, cuMemHostUnregister, memory);
    else
        status = TMS_DRIVER_CALL(driver, &context, error, cuMemHostRegister, memory,
                                 tms_host_round(object->bytes, tms_host_page_bytes()),
                                 CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY);
    tms_devices_leave(store->copying->devices, object->device);
    return status;
}

/* Called and returns with the lock held, which it releases in between. */
static void work(tms_shared_store_t *store, tms_shared_object_t *object) {
    tms_error_t reason;
    object->busy = true;
    pthread_mutex_unlock(&store->lock);
    const tms_status_t status = change(store, object, &reason);
    if (status != TMS_OK && object->registered)
        tms_log_recurring(store->copying->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, &reason,
                          "The shared memory stays registered; later calls try again.");
    else if (status != TMS_OK)
        tms_log_once(store->copying->log, &store->warned_not_registered, TMS_LOG_WARNING,
                     "%s Contents of shared backups are copied through pinned memory, which is slower.", reason.message);
    pthread_mutex_lock(&store->lock);
    object->busy = false;
    object->stuck = status != TMS_OK && object->registered;
    store->refuses |= status != TMS_OK && !object->registered;
    if (status == TMS_OK) object->registered = !object->registered;
    if (object->users == 0 && !object->registered) tms_shared_object_free(store, object);
}

/* ---- the thread ---- */

/* Under the lock. A close and a drain wait for this. */
static void end_run(tms_shared_store_t *store) {
    store->registrar_runs = false;
    pthread_cond_broadcast(&store->changed);
}

static void *run(void *argument) {
    tms_shared_store_t *store = argument;
    pthread_detach(pthread_self());
    pthread_mutex_lock(&store->lock);
    for (tms_shared_object_t *object; (object = next_work(store));) work(store, object);
    end_run(store);
    pthread_mutex_unlock(&store->lock);
    return NULL;
}

void tms_shared_registrar_start(tms_shared_store_t *store) {
    pthread_t thread;
    pthread_mutex_lock(&store->lock);
    for (tms_shared_object_t *object = store->objects; object; object = object->next) object->stuck = false;
    const bool starts = !store->registrar_runs && find_work(store);
    if (starts) store->registrar_runs = true;
    pthread_mutex_unlock(&store->lock);
    if (!starts) return;
    const int os_error = tms_thread_start(&thread, run, store);
    if (os_error == 0) return;
    pthread_mutex_lock(&store->lock);
    end_run(store);
    pthread_mutex_unlock(&store->lock);
    tms_log_once(
        store->copying->log, &store->warned_not_registered, TMS_LOG_WARNING,
        "pthread_create failed (%s), so that shared backups are not registered with the driver. Contents are copied "
        "through pinned memory, which is slower.",
        TMS_OS_TEXT(os_error));
}

void tms_shared_registrar_hold(tms_shared_store_t *store) {
    pthread_mutex_lock(&store->lock);
    store->in_call = true;
    pthread_mutex_unlock(&store->lock);
}

void tms_shared_registrar_let_go(tms_shared_store_t *store) {
    pthread_mutex_lock(&store->lock);
    store->in_call = false;
    store->quiet_until = tms_wait_now() + TMS_SHARED_QUIET_SECONDS;
    pthread_mutex_unlock(&store->lock);
    tms_shared_registrar_start(store);
}

void tms_shared_registrar_close(tms_shared_store_t *store, double deadline) {
    pthread_mutex_lock(&store->lock);
    store->closing = true;
    pthread_cond_broadcast(&store->changed);
    while (store->registrar_runs && tms_wait_until(&store->changed, &store->lock, deadline)) {
    }
    pthread_mutex_unlock(&store->lock);
}
