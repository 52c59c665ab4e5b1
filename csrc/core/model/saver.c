#include "core/model/saver.h"

#include <errno.h>

tms_status_t tms_saver_init(tms_saver_t *saver, const tms_config_t *config, tms_log_t *log, tms_devices_t *devices,
                            tms_region_defaults_t *regions, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *saver = (tms_saver_t){.config = config, .log = log, .devices = devices, .regions = regions};
    const tms_copying_t copying = {
        .devices = devices, .log = log, .quarantine = &saver->quarantine, .chunk_bytes = TMS_COPY_CHUNK_BYTES};
    tms_status_t status = tms_quarantine_init(&saver->quarantine, error);
    if (status != TMS_OK) return status;
    status = tms_backup_stores_init(&saver->stores, config, &copying, error);
    if (status != TMS_OK) goto release_quarantine;
    status = tms_device_locks_init(&saver->device_locks, config, devices, error);
    if (status != TMS_OK) goto release_stores;
    status = tms_descriptors_init(&saver->descriptors, error);
    if (status != TMS_OK) goto destroy_device_locks;
    status = tms_events_init(&saver->events, TMS_EVENTS_KEPT, error);
    if (status != TMS_OK) goto release_descriptors;
    status = tms_shared_page_init(&saver->shared_page, config->shared_page, config->shared_page_directory, error);
    if (status != TMS_OK) goto release_events;
    saver->account = (tms_account_t){.events = &saver->events, .shared_page = &saver->shared_page, .stores = &saver->stores};
    if (pthread_mutex_init(&saver->lock, NULL) != 0) {
        status = tms_error_set_os(error, &context, "pthread_mutex_init", ENOMEM, NULL);
        goto release_page;
    }
    tms_wait_condition_init(&saver->turn);
    tms_pending_resumes_init(&saver->pending_resumes);
    tms_registry_init(&saver->registry);
    tms_registry_init(&saver->ranges);
    tms_registry_init(&saver->quarantined_ranges);
    tms_registry_init(&saver->handles);
    tms_capture_init(&saver->capture);
    saver->callback_patience_seconds = TMS_CALLBACK_PATIENCE_SECONDS;
    atomic_init(&saver->guard.on, config->guard);
    atomic_init(&saver->host_policy, config->retain_cpu_backup ? TMS_HOST_RETAIN : config->host_policy);
    return TMS_OK;

release_page:
    tms_shared_page_release(&saver->shared_page);
release_events:
    tms_events_release(&saver->events);
release_descriptors:
    tms_descriptors_release(&saver->descriptors);
destroy_device_locks:
    tms_device_locks_destroy(&saver->device_locks);
release_stores:
    tms_backup_stores_drain(&saver->stores);
    tms_backup_stores_release(&saver->stores);
release_quarantine:
    tms_quarantine_release(&saver->quarantine);
    return status;
}

void tms_saver_release(tms_saver_t *saver) {
    tms_device_locks_destroy(&saver->device_locks);
    tms_backup_stores_drain(&saver->stores);
    tms_quarantine_release(&saver->quarantine); /* comes first, because it may hold resources that the stores release next */
    tms_backup_stores_release(&saver->stores);
    pthread_cond_destroy(&saver->pending_resumes.ended);
    pthread_mutex_destroy(&saver->pending_resumes.lock);
    pthread_cond_destroy(&saver->turn);
    tms_descriptors_release(&saver->descriptors);
    tms_shared_page_release(&saver->shared_page);
    tms_events_release(&saver->events);
    pthread_mutex_destroy(&saver->lock);
}

/* ---- the process and its settings ---- */

tms_status_t tms_saver_check_process(tms_saver_t *saver, const tms_error_context_t *context, tms_error_t *error) {
    if (!atomic_load(&saver->forked)) return TMS_OK;
    return tms_error_set(error, TMS_FORKED, context, "start workers with the spawn or forkserver method instead");
}

tms_status_t tms_saver_check_settings(const tms_saver_t *saver, tms_error_t *error) {
    const tms_error_t *malformed = &saver->config->malformed;
    if (malformed->status != TMS_OK && error) *error = *malformed;
    return malformed->status;
}

tms_region_t tms_saver_settings(tms_saver_t *saver) {
    int depth = 0;
    tms_region_t region = tms_region_current(saver->regions, &depth);
    if (depth > 0 || !tms_capture_visible(&saver->capture)) return region;
    pthread_mutex_lock(&saver->lock);
    (void)tms_capture_settings(&saver->capture, &region);
    pthread_mutex_unlock(&saver->lock);
    return region;
}

tms_host_policy_t tms_saver_host_policy(tms_saver_t *saver, tms_host_policy_t policy) {
    if (policy != TMS_HOST_DEFAULT) return policy;
    return (tms_host_policy_t)atomic_load(&saver->host_policy);
}

/* ---- look-ups and counters ---- */

bool tms_saver_has_segments(tms_saver_t *saver) {
    pthread_mutex_lock(&saver->lock);
    bool any = saver->registry.count > 0;
    pthread_mutex_unlock(&saver->lock);
    return any;
}

void tms_saver_unpublish(tms_saver_t *saver, tms_segment_t *segment) {
    tms_registry_remove(&saver->registry, &segment->node);
    tms_stats_add(&saver->stats.frees_total, 1);
    tms_account_remove(&saver->account, segment);
}

/* ---- errors ---- */

tms_error_context_t tms_saver_context(const char *operation, const tms_segment_t *segment) {
    return (tms_error_context_t){.operation = operation,
                                 .device = segment->device,
                                 .bytes = tms_segment_reserved(segment),
                                 .address = tms_segment_address(segment),
                                 .tag = segment->tag->name};
}

void tms_saver_log_peer_failure(tms_saver_t *saver, tms_status_t status, const tms_error_t *reason) {
    if (status != TMS_OK && status != TMS_DRIVER_UNAVAILABLE)
        tms_log_recurring(saver->log, TMS_LOG_NO_PEER_ACCESS, TMS_LOG_WARNING, reason, "");
}
