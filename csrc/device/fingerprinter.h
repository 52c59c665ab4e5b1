/* The kernel that computes fingerprints of device memory (include/tms_fingerprint.h), loaded into the primary context of
 * each device that uses it.
 *
 * It is loaded by the first launch on a device, never earlier, and again after the context was reset. The module takes at
 * most 2 MiB of device memory. It is never unloaded except by tms_fingerprinter_release: it ends with its context.
 *
 * Until a key is set, a key is drawn at random when a module is loaded, so fingerprints of different modules differ for
 * equal contents. From tms_fingerprinter_set_key on all modules have that key. A module that has another one gets it by its
 * next launch. Fingerprints of two keys differ for equal contents, so a caller that keeps fingerprints keeps `keys` with
 * them.
 *
 * Only the call that has the turn (core/model/turn.h) uses it: on its thread, or on the thread of a device's part, which
 * launches on that device only. The key is set while nothing is launched. No lock. */
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
    uint64_t keys; /* if has_key: `keys` of the fingerprinter when it got its key */
} tms_fingerprint_module_t;

/* Zeros: nothing is loaded, and no key is set. */
typedef struct tms_fingerprinter {
    tms_fingerprint_module_t modules[TMS_MAX_DEVICES];
    const tms_fingerprint_key_t *key; /* NULL: drawn at random */
    uint64_t keys;                    /* number of keys that have been set */
} tms_fingerprinter_t;

/* Sets the key of all launches from now on. The key stays valid and unchanged until another one is set. To be called once
 * for each key, because every fingerprint that is known becomes useless. */
void tms_fingerprinter_set_key(tms_fingerprinter_t *fingerprinter, const tms_fingerprint_key_t *key);

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
