/* The one state of the process: every global of this library that is not thread-local.
 *
 * Made on first use by any thread (tms_state), never torn down: at exit the system takes the memory, and process.c removes
 * the files. Making it reads the environment and nothing else: no driver, no thread, no file. */
#ifndef TMS_STATE_H
#define TMS_STATE_H

#include "saver.h"

/* The runtime's functions that the preload library stands before: resolved lazily (preload/hooks.h). */
enum { TMS_MAX_HOOKS = 16 };

typedef struct tms_state {
    tms_log_t log;
    tms_config_t config;
    tms_driver_t driver;
    tms_devices_t devices;
    tms_region_defaults_t regions;
    tms_saver_t saver;
    _Atomic(void *) real[TMS_MAX_HOOKS]; /* preload only: the runtime's own functions */
    _Atomic bool said_no_runtime;        /* preload only: no CUDA runtime to hand on to */
    _Atomic bool said_not_managed;       /* preload only: an allocation in a region had to be ordinary */
    _Atomic bool said_too_many_captures;
    _Atomic bool said_malformed_use; /* compat.c: one warning about wrong use is enough */
} tms_state_t;

/* The state, made if need be; NULL only if memory for it could not be had, with *error filled. After the first call one
 * atomic load. */
tms_state_t *tms_state(tms_error_t *error);
/* One warning that a capture began for which there is no room in the list. */
void tms_state_say_too_many_captures(tms_state_t *state);
/* The state if it has been made, else NULL: for paths that must not make it (fork, exit). */
tms_state_t *tms_state_if_made(void);

#endif
