/* The visible stream captures: begun by `cuda_graph()`, by torch's or an interposed runtime's call, or on the caller's own
 * stream.
 *
 * During a capture nothing may synchronise a context. So pause and resume fail with a clear error before anything changes,
 * and frees of ACTIVE memory are deferred (allocation/free.h). The driver has no query for "a capture is active", so this is
 * a list of announced captures. Captures that were not announced stay invisible.
 *
 * An entry has up to two parts: the announcement of a program (with settings, before the capture begins), and the stream on
 * which a capture began. Each part has its own identity, and the entry lives as long as one of them. A begin on a stream
 * completes the announcement of the same thread. So every capture counts once, and each end is matched to its own begin, in
 * any order. The stream of an entry can be queried for an active capture (capture_stream.h) once the call that begins it has
 * returned. Before that the stream may report no capture.
 *
 * Every call needs the saver's lock, except tms_capture_visible, which reads one atomic. */
#ifndef TMS_CAPTURE_H
#define TMS_CAPTURE_H

#include <stdatomic.h>

#include "base/settings.h"

enum { TMS_CAPTURE_MAX_NESTED = 16 };

/* The stream on which a capture has begun. */
typedef struct tms_capture_stream {
    uintptr_t key;              /* identifies the stream; not 0 */
    void *stream;               /* a CUstream */
    int device;                 /* the device whose primary context owns it; TMS_NO_DEVICE: it cannot be queried */
    unsigned long long context; /* the identifier of that context, which changes when it is reset */
} tms_capture_stream_t;

typedef struct tms_capture_entry {
    uint64_t announced;         /* identity of the announcement; 0: there is none, or it has ended */
    uint64_t begun;             /* identity of the begin on `where`; 0: there is none, or it has ended */
    uintptr_t thread;           /* the announcing thread */
    uintptr_t beginner;         /* thread whose call that begins it on `where` has not returned; 0: none */
    tms_capture_stream_t where; /* the stream on which it has begun, if `begun` is not 0 */
    tms_region_t settings;      /* `managed` is false if there are no settings */
} tms_capture_entry_t;

typedef struct tms_capture {
    _Atomic int visible; /* number of entries, in order of arrival */
    uint64_t last_identity;
    tms_capture_entry_t entries[TMS_CAPTURE_MAX_NESTED];
} tms_capture_t;

void tms_capture_init(tms_capture_t *capture);
static inline int tms_capture_visible(const tms_capture_t *capture) { return atomic_load(&capture->visible); }

/* Announces a capture; `region` (NULL: none) applies to allocations of threads outside any region. *identity is not 0.
 * TMS_INVALID_STATE beyond TMS_CAPTURE_MAX_NESTED. */
tms_status_t tms_capture_begin(tms_capture_t *capture, const tms_region_t *region, uint64_t *identity,
                               const tms_error_context_t *context, tms_error_t *error);
/* A capture begins on a stream. If a capture on that stream has no recorded end, *identity is its identity and *known is
 * true: the begin replaces it, or fails. */
tms_status_t tms_capture_begin_on(tms_capture_t *capture, const tms_capture_stream_t *where, uint64_t *identity, bool *known,
                                  const tms_error_context_t *context, tms_error_t *error);
/* The call that begins the capture with this identity has returned successfully. */
void tms_capture_note_begin(tms_capture_t *capture, uint64_t identity);
/* Ends the part with this identity. Returns false if there is none. */
bool tms_capture_end(tms_capture_t *capture, uint64_t identity);
/* For callers without an identity: ends the last announcement or, without any, the last begin. */
bool tms_capture_end_last(tms_capture_t *capture);
/* Returns the identity of the capture that began on a stream, or 0 if there is none. */
uint64_t tms_capture_find(const tms_capture_t *capture, uintptr_t key);
/* Drops the entries for whose stream `ended` returns true, and returns their number. Skips captures that another thread is
 * about to begin. */
int tms_capture_drop(tms_capture_t *capture, bool (*ended)(void *context, const tms_capture_stream_t *where), void *context);
/* Gets the settings of the innermost capture that has settings. Returns false if there is none. */
bool tms_capture_settings(const tms_capture_t *capture, tms_region_t *region);

#endif
