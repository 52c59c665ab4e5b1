/* The kernel that computes fingerprints of device memory (include/tms_fingerprint.h), loaded into the primary context of
 * each device that uses it.
 *
 * It is loaded by the first launch on a device, never earlier, and again after the context was reset. The module takes at
 * most 2 MiB of device memory. It is never unloaded except by tms_fingerprinter_release: it ends with its context. The key
 * is drawn at random when the module is loaded, so fingerprints of different modules differ for equal contents.
 *
 * Only the call that has the turn (core/model/turn.h) uses it. No lock. */
#ifndef TMS_FINGERPRINTER_H
#define TMS_FINGERPRINTER_H

#include "device/device.h"
#include "include/tms_fingerprint.h"

/* The module of one device. A failed step is made again by the next launch. */
typedef struct tms_fingerprint_module {
    unsigned long long context; /* identifier of the context (cuCtxGetId) that the rest belongs to */
    CUmodule module;            /* NULL: not loaded */
    CUfunction function;        /* NULL: not known yet */
    bool has_key;
} tms_fingerprint_module_t;

/* Zeros: nothing is loaded. */
typedef struct tms_fingerprinter {
    tms_fingerprint_module_t modules[TMS_MAX_DEVICES];
} tms_fingerprinter_t;

/* Queues the kernel in `stream`. `chunks` and `results` have `count` elements, at least one, in pinned host memory that
 * stays until the stream has finished. The device's primary context is current, and all of the chunks' memory is mapped: an
 * access to other memory would end the context. After a failure nothing of the launch is queued, but a copy of the key may
 * be. */
tms_status_t tms_fingerprinter_launch(tms_fingerprinter_t *fingerprinter, const tms_driver_table_t *driver, int device,
                                      CUstream stream, const tms_fingerprint_chunk_t *chunks, uint32_t count,
                                      tms_fingerprint_t *results, const tms_error_context_t *context, tms_error_t *error);
/* For tests: unloads the modules. No kernel is running. */
void tms_fingerprinter_release(tms_fingerprinter_t *fingerprinter, tms_devices_t *devices);

#endif
