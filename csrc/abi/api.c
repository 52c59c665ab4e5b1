/* The function table: each entry gets the process's state and calls the module that does the work. */

#include <stdlib.h>
#include <string.h>

#include "abi/entries.h"
#include "abi/interface.h"
#include "abi/process.h"
#include "abi/start.h"
#include "core/allocation/allocation.h"
#include "core/allocation/capture_end.h"
#include "core/allocation/free.h"
#include "core/model/inspect.h"
#include "core/model/peers.h"
#include "core/model/turn.h"
#include "core/transition/pause.h"
#include "core/transition/pending.h"
#include "core/transition/resume.h"

tms_status_t tms_api_allocate(uint64_t bytes, int32_t device, uint64_t *address, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    if (!state) return TMS_OUT_OF_HOST_MEMORY;
    tms_region_t region = tms_saver_settings(&state->saver);
    return tms_allocation_create(&state->saver, &region, bytes, device, address, error);
}

tms_status_t tms_api_free(uint64_t address, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_free_address(&state->saver, address, error) : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_region_enter(const tms_region_settings_t *settings, int32_t follows, uint64_t *region,
                                  tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    tms_status_t status = state ? tms_saver_check_settings(&state->saver, error) : TMS_OUT_OF_HOST_MEMORY;
    return status == TMS_OK ? tms_region_enter(&state->regions, settings, follows != 0, region, error) : status;
}

int32_t tms_api_region_leave(uint64_t region) {
    tms_state_t *state = tms_state_if_made();
    return state ? tms_region_leave(&state->regions, region) : TMS_NO_SUCH_REGION;
}

void tms_api_region_end_following(const char *tag) {
    tms_state_t *state = tms_state_if_made();
    if (state) tms_region_end_following(&state->regions, tag);
}

void tms_api_region_current(tms_region_settings_t *settings, int32_t *depth) {
    tms_state_t *state = tms_state(NULL);
    if (!state) {
        *settings = (tms_region_settings_t){.tag = TMS_DEFAULT_TAG};
        if (depth) *depth = 0;
        return;
    }
    tms_region_t region = tms_region_current(&state->regions, depth);
    *settings = (tms_region_settings_t){.managed = region.managed,
                                        .backup = region.backup,
                                        .tag = region.tag->name,
                                        .host_policy = region.host_policy,
                                        .own_handles = region.own_handles};
}

tms_status_t tms_api_region_set(const tms_region_settings_t *settings, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_region_set(&state->regions, settings, error) : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_pause(const tms_selection_t *selection, tms_report_t *report, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_pause_perform(&state->saver, selection, report, error) : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_check_pause(const tms_selection_t *selection, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_pause_check(&state->saver, selection, error) : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_resume(const tms_selection_t *selection, tms_report_t *report, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_resume_perform(&state->saver, selection, report, error) : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_host_backup(uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer, void **host,
                                 tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_inspect_host_backup(&state->saver, address, bytes, buffer, host, error) : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_read_only_backup(uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer, void **host,
                                      tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_inspect_read_only_backup(&state->saver, address, bytes, buffer, host, error) : TMS_OUT_OF_HOST_MEMORY;
}

void tms_api_host_buffer_release(tms_host_buffer_t *buffer) { tms_host_buffer_drop(buffer); }

void tms_api_set_memory_margin(uint64_t bytes) {
    tms_state_t *state = tms_state(NULL);
    if (state) atomic_store(&state->saver.memory_margin_bytes, bytes);
}

uint64_t tms_api_get_memory_margin(void) {
    tms_state_t *state = tms_state(NULL);
    return state ? atomic_load(&state->saver.memory_margin_bytes) : 0;
}

void tms_api_set_guard(int32_t on) {
    tms_state_t *state = tms_state(NULL);
    if (state) atomic_store(&state->saver.guard.on, on != 0);
}

int32_t tms_api_get_guard(void) {
    tms_state_t *state = tms_state(NULL);
    return state && atomic_load(&state->saver.guard.on);
}

int32_t tms_api_get_disabled(void) {
    tms_state_t *state = tms_state(NULL);
    return state && state->config.disable;
}

int32_t tms_api_get_host_policy(void) {
    tms_state_t *state = tms_state(NULL);
    return state ? atomic_load(&state->saver.host_policy) : TMS_HOST_RELEASE;
}

tms_status_t tms_api_set_host_policy(int32_t policy, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "set host_memory", .device = TMS_NO_DEVICE};
    tms_state_t *state = tms_state(error);
    if (!state) return TMS_OUT_OF_HOST_MEMORY;
    if (policy != TMS_HOST_RELEASE && policy != TMS_HOST_POOL && policy != TMS_HOST_RETAIN)
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "there is no host memory policy %d", (int)policy);
    atomic_store(&state->saver.host_policy, policy);
    return TMS_OK;
}

int32_t tms_api_get_retain_backup(void) { return tms_api_get_host_policy() == TMS_HOST_RETAIN; }

/* Turning it off restores the policy of the environment. */
void tms_api_set_retain_backup(int32_t retain) {
    tms_state_t *state = tms_state(NULL);
    int on = TMS_HOST_RETAIN;
    if (!state) return;
    if (retain)
        atomic_store(&state->saver.host_policy, TMS_HOST_RETAIN);
    else
        (void)atomic_compare_exchange_strong(&state->saver.host_policy, &on,
                                             state->config.host_policy == TMS_HOST_RETAIN ? TMS_HOST_RELEASE
                                                                                          : state->config.host_policy);
}

tms_status_t tms_api_reserve_host_memory(uint64_t bytes, int32_t device, tms_error_t *error) {
    tms_error_context_t context = {.operation = "reserve_host_memory", .device = device, .bytes = bytes};
    tms_state_t *state = tms_state(error);
    const tms_device_table_t *devices = NULL;
    if (!state) return TMS_OUT_OF_HOST_MEMORY;
    tms_status_t status = tms_saver_check_process(&state->saver, &context, error);
    if (status == TMS_OK) status = tms_saver_check_settings(&state->saver, error);
    if (status == TMS_OK) status = tms_devices_load(&state->devices, NULL, &devices, &context, error);
    if (status == TMS_OK && device == TMS_NO_DEVICE)
        status = tms_devices_current(&state->devices, &context.device, &context, error);
    if (status == TMS_OK) status = tms_devices_check(devices, &context, error);
    return status == TMS_OK ? tms_host_store_reserve(&state->saver.stores.host, context.device, bytes, error) : status;
}

void tms_api_release_host_memory(void) {
    tms_state_t *state = tms_state_if_made();
    if (state) tms_host_store_trim(&state->saver.stores.host);
}

void tms_api_close(void) {
    tms_state_t *state = tms_state_if_made();
    if (!state || atomic_load(&state->saver.forked)) return;
    tms_late_devices_listen(&state->late_devices, NULL, NULL, 0);
    tms_process_end_threads(&state->saver);
}

tms_status_t tms_api_resume_begin(const tms_selection_t *selection, tms_pending_t **pending, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_resume_begin(&state->saver, selection, pending, error) : TMS_OUT_OF_HOST_MEMORY;
}

int32_t tms_api_pending_done(tms_pending_t *pending) { return tms_pending_done(pending); }

tms_status_t tms_api_pending_await(tms_pending_t *pending, int32_t (*interrupted)(void *), void *context,
                                   tms_error_t *error) {
    return tms_pending_await(pending, interrupted, context, error);
}

tms_status_t tms_api_pending_wait(tms_pending_t *pending, int32_t (*interrupted)(void *), void *context,
                                  tms_report_t *report, tms_error_t *error) {
    return tms_pending_wait(pending, interrupted, context, report, error);
}

tms_status_t tms_api_pending_wait_stream(tms_pending_t *pending, void *stream, int32_t (*interrupted)(void *), void *context,
                                         tms_error_t *error) {
    return tms_pending_wait_stream(pending, stream, interrupted, context, error);
}

void tms_api_pending_release(tms_pending_t *pending) { tms_pending_release(pending); }

tms_status_t tms_api_set_disk_directory(const char *path, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    return state ? tms_disk_set_directory(&state->saver.stores.disk, path, error) : TMS_OUT_OF_HOST_MEMORY;
}

tms_status_t tms_api_capture_begin(const tms_region_settings_t *settings, uint64_t *identity, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    tms_region_t region;
    tms_status_t status = state ? tms_saver_check_settings(&state->saver, error) : TMS_OUT_OF_HOST_MEMORY;
    if (status == TMS_OK && settings) status = tms_region_from_settings(&state->regions, settings, &region, error);
    if (status == TMS_OK) status = tms_capture_table_begin(&state->saver, settings ? &region : NULL, identity, error);
    return status;
}

tms_status_t tms_api_capture_begin_on(void *stream, uint64_t *identity, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    tms_capture_start_t begun;
    if (!state) return TMS_OUT_OF_HOST_MEMORY;
    tms_status_t status = tms_capture_table_begin_on(&state->saver, stream, &begun, error);
    if (status == TMS_INVALID_STATE && !begun.must_not_begin) {
        tms_state_warn_too_many_captures(state);
        status = TMS_OK;
    }
    if (status == TMS_OK) *identity = begun.identity;
    return status;
}

int32_t tms_api_capture_end(uint64_t identity, int32_t unless_it_goes_on) {
    tms_state_t *state = tms_state_if_made();
    if (!state) return 0;
    if (identity && unless_it_goes_on && tms_capture_table_goes_on(&state->saver, identity)) {
        tms_capture_table_begun(&state->saver, identity);
        return 0;
    }
    return tms_capture_end_of(&state->saver, identity);
}

void tms_api_capture_begun(uint64_t identity) {
    tms_state_t *state = tms_state_if_made();
    if (state) tms_capture_table_begun(&state->saver, identity);
}

tms_status_t tms_api_refresh_peers(tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    if (!state) return TMS_OUT_OF_HOST_MEMORY;
    return tms_inspect_explain_loss(&state->saver, tms_peers_refresh(&state->saver, error), error);
}

tms_status_t tms_api_listen_devices(tms_device_listener_t listener, void *context, uint64_t mask, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    if (!state) return TMS_OUT_OF_HOST_MEMORY;
    tms_late_devices_listen(&state->late_devices, listener, context, mask);
    return TMS_OK;
}

/* The driver and the devices for the queries below; fails in a forked child like everything that needs the GPU. */
static tms_status_t load_devices(const tms_error_context_t *context, tms_state_t **made, const tms_driver_table_t **driver,
                                 const tms_device_table_t **devices, tms_error_t *error) {
    tms_state_t *state = tms_state(error);
    if (!state) return TMS_OUT_OF_HOST_MEMORY;
    tms_status_t status = tms_saver_check_process(&state->saver, context, error);
    if (status == TMS_OK) status = tms_devices_load(&state->devices, driver, devices, context, error);
    if (status == TMS_OK) *made = state;
    return status;
}

tms_status_t tms_api_device_count(int32_t *count, tms_error_t *error) {
    tms_error_context_t context = {.operation = "device_count", .device = TMS_NO_DEVICE};
    tms_state_t *state = NULL;
    const tms_device_table_t *devices = NULL;
    tms_status_t status = load_devices(&context, &state, NULL, &devices, error);
    if (status == TMS_OK) *count = devices->count;
    return status;
}

tms_status_t tms_api_active_devices(uint64_t *mask, tms_error_t *error) {
    tms_error_context_t context = {.operation = "active_devices", .device = TMS_NO_DEVICE};
    tms_state_t *state = NULL;
    tms_status_t status = load_devices(&context, &state, NULL, NULL, error);
    if (status != TMS_OK) return status;
    return tms_inspect_explain_loss(&state->saver, tms_devices_active(&state->devices, mask, &context, error), error);
}

/* load_devices for a query about one device, `context->device`. */
static tms_status_t load_device(const tms_error_context_t *context, tms_state_t **made, const tms_driver_table_t **driver,
                                const tms_device_table_t **devices, tms_error_t *error) {
    tms_status_t status = load_devices(context, made, driver, devices, error);
    return status == TMS_OK ? tms_devices_check(*devices, context, error) : status;
}

tms_status_t tms_api_device_info(int32_t device, tms_device_info_t *info, tms_error_t *error) {
    tms_error_context_t context = {.operation = "device_info", .device = device};
    tms_state_t *state = NULL;
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *devices = NULL;
    CUuuid uuid;
    tms_status_t status = load_device(&context, &state, &driver, &devices, error);
    if (status == TMS_OK)
        status = TMS_DRIVER_CALL(driver, &context, error, cuDeviceGetUuid, &uuid, devices->device[device].handle);
    if (status != TMS_OK) return status;
    tms_device_write_uuid(&uuid, info->uuid);
    info->total_bytes = devices->device[device].total_bytes;
    return TMS_OK;
}

tms_status_t tms_api_device_memory(int32_t device, uint64_t *free_bytes, uint64_t *total_bytes, tms_error_t *error) {
    tms_error_context_t context = {.operation = "device_memory", .device = device};
    tms_state_t *state = NULL;
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *devices = NULL;
    tms_status_t status = load_device(&context, &state, &driver, &devices, error);
    if (status != TMS_OK) return status;
    status = tms_devices_memory(&state->devices, device, free_bytes, total_bytes, &context, error);
    return tms_inspect_explain_loss(&state->saver, status, error);
}

void tms_api_open_log(void) {
    tms_state_t *state = tms_state(NULL);
    if (state) tms_log_queue_open(&state->log_queue);
}

tms_log_line_t *tms_api_close_log(void) {
    tms_state_t *state = tms_state_if_made();
    if (!state) return NULL;
    tms_log_queue_close(&state->log_queue);
    return tms_log_queue_take(&state->log_queue);
}

void tms_api_write_log(int32_t level, const char *text) {
    const tms_state_t *state = tms_state(NULL);
    if (level < TMS_LOG_ERROR || level > TMS_LOG_DEBUG) return;
    if (!state || tms_log_enabled(&state->log, (tms_log_level_t)level)) tms_log_write_stderr((tms_log_level_t)level, text);
}

int32_t tms_api_in_transition(void) { return tms_turn_is_inside(); }

const tms_api_t *tms_get_api(uint32_t interface) {
    static const tms_api_t api = {
#define TMS_C_FUNCTION(result, name, parameters) .name = tms_api_##name,
#include "include/tms_api.def"
    };
    return interface == tms_interface() ? &api : NULL;
}
