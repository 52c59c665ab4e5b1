/* The one state of the process: every global of this library that is not thread-local.
 *
 * Created on first use by any thread (start.h) and never destroyed: at exit the system releases the memory, and process.c
 * removes the files. Creating it only reads the environment; it uses no driver, thread or file. No lock: it is published
 * atomically. */
#ifndef TMS_STATE_H
#define TMS_STATE_H

#include "abi/late_devices.h"
#include "base/ledger.h"
#include "core/model/saver.h"

/* The maximum number of interposed functions (preload/resolve.h). */
enum { TMS_MAX_HOOKS = 64 };

typedef struct tms_state {
    tms_log_t log;
    tms_log_queue_t log_queue; /* the queue of `log` */
    tms_config_t config;
    tms_driver_t driver;
    tms_devices_t devices;
    tms_region_defaults_t regions;
    tms_saver_t saver;
    tms_late_devices_t late_devices;
    tms_ledger_t ledger;                              /* preload only: memory that is not managed */
    _Atomic(void *) real[TMS_MAX_HOOKS];              /* preload only: the runtime's functions, resolved lazily */
    _Atomic uintptr_t allocator_begin, allocator_end; /* preload only: the code of PyTorch's allocator (handle_hooks.c) */
    _Atomic bool warned_no_runtime;                   /* preload only: there is no CUDA runtime to forward to */
    _Atomic bool warned_not_managed;                  /* preload only: an allocation in a region is not managed */
    _Atomic bool warned_no_ipc;                       /* preload only: CUDA's IPC handles were asked for managed memory */
    _Atomic bool interpreter_notified; /* preload only: the first managed allocation has been made (preload/interpreter.h) */
    _Atomic bool warned_too_many_captures;
    _Atomic bool warned_malformed_use; /* compat.c: wrong use has been logged */
    _Atomic bool warned_refusal;  /* torch_allocator.c: an allocation that memory_margin_bytes forbids has been logged */
    _Atomic bool warned_pool_use; /* torch_allocator.c: use of our allocator outside regions has been logged */
} tms_state_t;

/* Creates a state that is not published yet. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_state_create(tms_state_t **made, tms_error_t *error);
/* Destroys a state that was never published. */
void tms_state_destroy(tms_state_t *state);
/* Publishes `fresh` as the state of the process, unless there is one already. Returns the state of the process. */
tms_state_t *tms_state_publish(tms_state_t *fresh);
/* The state if it has been created, else NULL: for paths that must not create it (fork, exit). */
tms_state_t *tms_state_if_made(void);

/* Warns once that a capture began while the table of captures was full. */
void tms_state_warn_too_many_captures(tms_state_t *state);

#endif
