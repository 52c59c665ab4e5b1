#include "state.h"

#include <errno.h>
#include <stdlib.h>

#include "process.h"

/* The only global of the library. */
static _Atomic(tms_state_t *) the_state;

static const tms_error_context_t start_context = {.operation = "start", .device = TMS_NO_DEVICE};

static tms_status_t make_state(tms_state_t **made, tms_error_t *error) {
    tms_state_t *state = calloc(1, sizeof(*state));
    if (!state) return tms_error_set_os(error, &start_context, "calloc", ENOMEM, NULL);
    tms_log_init(&state->log, TMS_LOG_WARNING);
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

/* For a state that was never published. */
static void destroy_state(tms_state_t *state) {
    tms_saver_release(&state->saver);
    tms_region_release(&state->regions);
    tms_devices_release(&state->devices);
    tms_driver_release(&state->driver);
    tms_config_release(&state->config);
    free(state);
}

void tms_state_say_too_many_captures(tms_state_t *state) {
    tms_log_once(&state->log, &state->said_too_many_captures, TMS_LOG_WARNING,
                 "more than %d stream captures are under way at once; pause() will not see all of them",
                 TMS_CAPTURE_MAX_NESTED);
}

tms_state_t *tms_state_if_made(void) { return atomic_load_explicit(&the_state, memory_order_acquire); }

tms_state_t *tms_state(tms_error_t *error) {
    tms_state_t *published = tms_state_if_made();
    if (__builtin_expect(published != NULL, 1)) return published;

    /* Two threads may make one each; no lock is held meanwhile, and the second to finish throws its own away. */
    tms_state_t *fresh = NULL;
    if (make_state(&fresh, error) != TMS_OK) return NULL;
    if (!atomic_compare_exchange_strong(&the_state, &published, fresh)) {
        destroy_state(fresh);
        return published;
    }

    /* A process without the handlers works; only forked children and files left at exit would go unnoticed. */
    tms_error_t failure;
    if (tms_process_register(&failure) != TMS_OK) tms_log_write(&fresh->log, TMS_LOG_WARNING, "%s", failure.message);
    return fresh;
}
