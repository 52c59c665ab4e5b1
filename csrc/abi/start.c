#include "abi/start.h"

#include "abi/process.h"

tms_state_t *tms_state(tms_error_t *error) {
    tms_state_t *published = tms_state_if_made();
    if (__builtin_expect(published != NULL, 1)) return published;

    /* No lock is held, so two threads may each create a state; the second to finish discards its own. */
    tms_state_t *fresh = NULL;
    if (tms_state_create(&fresh, error) != TMS_OK) return NULL;
    /* A process works without the handlers, except for forked children and files left at exit. */
    tms_error_t failure;
    tms_status_t registered = tms_process_register(&failure);
    published = tms_state_publish(fresh);
    if (published != fresh) {
        tms_state_destroy(fresh);
        return published;
    }

    if (fresh->config.disable)
        tms_log_write(
            &fresh->log, TMS_LOG_WARNING,
            "TMS_DISABLE is set: torch_memory_saver does nothing in this process. Regions, pauses and resumes have no "
            "effect. Unset the variable to use the package.");
    if (registered != TMS_OK) tms_log_write(&fresh->log, TMS_LOG_WARNING, "%s", failure.message);
    return fresh;
}
