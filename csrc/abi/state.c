#include "abi/state.h"

#include <errno.h>
#include <stdlib.h>

/* The only global of the library. */
static _Atomic(tms_state_t *) the_state;

static const tms_error_context_t start_context = {.operation = "start", .device = TMS_NO_DEVICE};

tms_status_t tms_state_create(tms_state_t **made, tms_error_t *error) {
    tms_state_t *state = calloc(1, sizeof(*state));
    if (!state) return tms_error_set_os(error, &start_context, "calloc", ENOMEM, NULL);
    tms_log_init(&state->log, TMS_LOG_WARNING);
    state->log.queue = &state->log_queue;
    tms_status_t status = tms_config_read(&state->config, &state->log, error);
    if (status != TMS_OK) {
        free(state);
        return status;
    }
    tms_driver_init(&state->driver, state->config.driver_path, &state->log);
    tms_devices_init(&state->devices, &state->driver);

    status = tms_region_init(&state->regions, &state->config, error);
    if (status != TMS_OK) goto release_config;
    status = tms_saver_init(&state->saver, &state->config, &state->log, &state->devices, &state->regions, error);
    if (status != TMS_OK) goto release_regions;
    tms_late_devices_init(&state->late_devices);
    tms_ledger_init(&state->ledger);
    *made = state;
    return TMS_OK;

release_regions:
    tms_region_release(&state->regions);
release_config:
    tms_devices_release(&state->devices);
    tms_driver_release(&state->driver);
    tms_config_release(&state->config);
    free(state);
    return status;
}

void tms_state_destroy(tms_state_t *state) {
    tms_ledger_release(&state->ledger);
    tms_saver_release(&state->saver);
    tms_region_release(&state->regions);
    tms_devices_release(&state->devices);
    tms_driver_release(&state->driver);
    tms_config_release(&state->config);
    free(state);
}

void tms_state_warn_too_many_captures(tms_state_t *state) {
    tms_log_once(&state->log, &state->warned_too_many_captures, TMS_LOG_WARNING,
                 "more than %d stream captures are under way at once, and pause() cannot detect all of them: do not call "
                 "pause() before they have ended",
                 TMS_CAPTURE_MAX_NESTED);
}

tms_state_t *tms_state_if_made(void) { return atomic_load_explicit(&the_state, memory_order_acquire); }

tms_state_t *tms_state_publish(tms_state_t *fresh) {
    tms_state_t *published = NULL;
    return atomic_compare_exchange_strong(&the_state, &published, fresh) ? fresh : published;
}
