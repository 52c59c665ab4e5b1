/* The stream captures that we can see: begun by `cuda_graph()`, by torch's or an interposed runtime's call, or on the
 * caller's own stream.
 *
 * While one is under way nothing may synchronise a context, so pause and resume fail with a clear error before anything
 * changes, and frees of ACTIVE memory are deferred (retire.h). There is no driver query for "some capture is under way", so
 * this is a list of what was announced, and captures that were not announced stay unseen.
 *
 * An entry has up to two parts, each with an identity of its own, and is there as long as one of them: what a program
 * announced (with settings, before it begins the capture), and the stream on which a capture was seen to begin. A begin on
 * a stream completes what the same thread has announced. So every capture counts once, and an end is matched to its own
 * beginning, whatever ends first. An entry with a stream can be asked whether the capture goes on (capture_stream.h), from
 * when the call that begins it has returned: before that the stream may say that it does not capture.
 *
 * Every call needs the saver's lock, except tms_capture_visible, which reads one atomic. */
#ifndef TMS_CAPTURE_H
#define TMS_CAPTURE_H

#include <stdatomic.h>

#include "base/settings.h"

enum { TMS_CAPTURE_MAX_NESTED = 16 };

/* Where a capture is. */
typedef struct tms_capture_stream {
    uintptr_t key;              /* names the stream; not 0 */
    void *stream;               /* a CUstream */
    int device;                 /* in whose primary context it is; TMS_NO_DEVICE: it cannot be asked */
    unsigned long long context; /* the identifier of that context: another one, once it has been reset */
} tms_capture_stream_t;

typedef struct tms_capture_entry {
    uint64_t announced;         /* identity of the announcement; 0: there is none, or it has ended */
    uint64_t begun;             /* identity of the begin on `where`; 0: likewise */
    uintptr_t thread;           /* that announced it */
    uintptr_t beginner;         /* thread whose call that begins it on `where` has not returned; 0: none */
    tms_capture_stream_t where; /* if `begun` */
    tms_region_t settings;      /* `managed` is false where there are none */
} tms_capture_entry_t;

typedef struct tms_capture {
    _Atomic int visible; /* entries, in the order in which they came */
    uint64_t last_identity;
    tms_capture_entry_t entries[TMS_CAPTURE_MAX_NESTED];
} tms_capture_t;

void tms_capture_init(tms_capture_t *capture);
static inline int tms_capture_visible(const tms_capture_t *capture) { return atomic_load(&capture->visible); }

/* Announces one more capture; `region` (NULL: none) is for allocations of threads outside any region. *identity is not 0.
 * TMS_INVALID_STATE beyond TMS_CAPTURE_MAX_NESTED. */
tms_status_t tms_capture_begin(tms_capture_t *capture, const tms_region_t *region, uint64_t *identity,
                               const tms_error_context_t *context, tms_error_t *error);
/* A capture begins on a stream. Where one that was seen to begin there has not been seen to end, *identity is that one's and
 * *known true: the begin replaces it, or fails. */
tms_status_t tms_capture_begin_on(tms_capture_t *capture, const tms_capture_stream_t *where, uint64_t *identity, bool *known,
                                  const tms_error_context_t *context, tms_error_t *error);
/* The call that was to begin what has this identity has returned, and it was not refused. */
void tms_capture_begun(tms_capture_t *capture, uint64_t identity);
/* Ends what has this identity; false where nothing has. */
bool tms_capture_end(tms_capture_t *capture, uint64_t identity);
/* Ends the one announced last, for callers without an identity; the one begun last where none was announced. */
bool tms_capture_end_last(tms_capture_t *capture);
/* The identity of what was seen to begin on a stream; 0: nothing. */
uint64_t tms_capture_find(const tms_capture_t *capture, uintptr_t key);
/* Drops whole entries for whose stream `ended` is true; returns how many. Those that another thread is about to begin are
 * not asked. */
int tms_capture_drop(tms_capture_t *capture, bool (*ended)(void *context, const tms_capture_stream_t *where), void *context);
/* The settings of the innermost capture that has any; false where none has. */
bool tms_capture_settings(const tms_capture_t *capture, tms_region_t *region);

#endif
