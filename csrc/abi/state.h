/* The one state of the process: every global of this library that is not thread-local.
 *
 * Made on first use by any thread (start.h), never torn down: at exit the system takes the memory, and process.c removes
 * the files. Making it reads the environment and nothing else: no driver, no thread, no file. */
#ifndef TMS_STATE_H
#define TMS_STATE_H

#include "core/saver.h"

/* The runtime's functions that the preload library stands before: resolved lazily (preload/resolve.h). */
enum { TMS_MAX_HOOKS = 16 };

typedef struct tms_state {
    tms_log_t log;
    tms_config_t config;
    tms_driver_t driver;
    tms_devices_t devices;
    tms_region_defaults_t regions;
    tms_saver_t saver;
    _Atomic(void *) real[TMS_MAX_HOOKS]; /* preload only: the runtime's own functions */
    _Atomic bool warned_no_runtime;      /* preload only: no CUDA runtime to hand on to */
    _Atomic bool warned_not_managed;     /* preload only: an allocation in a region had to be ordinary */
    _Atomic bool warned_too_many_captures;
    _Atomic bool warned_malformed_use; /* compat.c: one warning about wrong use is enough */
} tms_state_t;

/* A state of its own, which nothing knows yet. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_state_create(tms_state_t **made, tms_error_t *error);
/* For one that was never published. */
void tms_state_destroy(tms_state_t *state);
/* Makes it the state of the process, unless there is one: returns the one that there is then. */
tms_state_t *tms_state_publish(tms_state_t *fresh);
/* The state if it has been made, else NULL: for paths that must not make it (fork, exit). */
tms_state_t *tms_state_if_made(void);

/* One warning that a capture began for which there is no room in the list. */
void tms_state_warn_too_many_captures(tms_state_t *state);

#endif
