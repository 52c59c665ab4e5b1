/* The log, which has one line for each message. A line goes to the queue while a caller has opened the queue (log_queue.h),
 * else to stderr: "torch_memory_saver[pid] level: text", written with one write(2) if the system takes all of it at once.
 *
 * Owns the level and the counts of recurring causes. May be called on any thread, with any lock held, in a forked child and
 * at exit. A line that is not queued is written at once, so the locks of the caller stay locked until stderr takes it.
 */
#ifndef TMS_LOG_H
#define TMS_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/log_queue.h"
#include "include/tms.h"

typedef enum tms_log_level {
    TMS_LOG_SILENT = 0,
    TMS_LOG_ERROR = 1,
    TMS_LOG_WARNING = 2,
    TMS_LOG_INFO = 3,
    TMS_LOG_DEBUG = 4
} tms_log_level_t;

/* Causes that recur with every free, allocation or retry: X(name, text of a summary). */
#define TMS_LOG_CAUSES(X)                                                                                                   \
    X(FREED_ON_LOST_DEVICE, "memory was freed although the device is lost")                                                 \
    X(FREE_DEFERRED, "freed memory could not go back to the driver yet")                                                    \
    X(QUARANTINED, "memory or addresses could not be released yet")                                                         \
    X(DAMAGED, "an allocation was damaged, or could not be repaired")                                                       \
    X(NO_PEER_ACCESS, "other devices were not given access")                                                                \
    X(NOT_RELAXED, "a driver call of this library may have invalidated a stream capture of another thread")                 \
    X(ANOTHER_FAILED, "one of several devices could not be waited for")                                                     \
    X(CONTEXT_KEPT, "a reference to the device's context was not given back")                                               \
    X(NOT_GUARDED, "paused addresses have no guard page")                                                                   \
    X(NOT_COMPARED, "all contents were copied, because it was not known which ones had changed")                            \
    X(NOT_VERIFIED, "restored contents were not checked")                                                                   \
    X(NOT_NAMED, "contents could not be named as objects of the shared store")                                              \
    X(WRITTEN_AGAIN, "a damaged backup file was written again")

typedef enum tms_log_cause {
#define TMS_LOG_CAUSE(name, text) TMS_LOG_##name,
    TMS_LOG_CAUSES(TMS_LOG_CAUSE)
#undef TMS_LOG_CAUSE
        TMS_LOG_CAUSE_COUNT
} tms_log_cause_t;

/* One slot for messages without a device, then one for each device. */
enum { TMS_LOG_DEVICES = 1 + 64 };

/* One cause on one device. */
typedef struct tms_log_recurrence {
    _Atomic uint64_t written;    /* the errors that have been logged, each as the bit that its hash selects */
    _Atomic uint64_t count;      /* messages suppressed */
    _Atomic uint64_t bytes;      /* sum of the bytes in these messages */
    _Atomic uint64_t summarized; /* `count` as of the last summary */
} tms_log_recurrence_t;

/* Part of the process's state (state.h). All zero is a silent log. */
typedef struct tms_log {
    _Atomic int level;
    _Atomic bool recurred; /* a message was suppressed since the last tms_log_summarize */
    tms_log_recurrence_t recurrences[TMS_LOG_CAUSE_COUNT][TMS_LOG_DEVICES];
    tms_log_queue_t *queue; /* NULL: every line goes to stderr */
} tms_log_t;

void tms_log_init(tms_log_t *log, tms_log_level_t level);
bool tms_log_enabled(const tms_log_t *log, tms_log_level_t level);
__attribute__((format(printf, 3, 4))) void tms_log_write(const tms_log_t *log, tms_log_level_t level, const char *format,
                                                         ...);
/* Writes one line to stderr, whatever the level of the log. */
void tms_log_write_stderr(tms_log_level_t level, const char *text);
/* Writes to stderr what is still in the queue. */
void tms_log_at_exit(const tms_log_t *log);

/* Writes a line only once for each `warned`, a flag that the caller keeps in the state. */
#define tms_log_once(log, warned, level, ...)                                                                               \
    do {                                                                                                                    \
        if (!atomic_exchange((warned), true)) tms_log_write((log), (level), __VA_ARGS__);                                   \
    } while (0)

/* Writes an error's message and then `consequence`, once for each result of each call, by cause and device. Repetitions are
 * only counted. At most 64 lines are written by cause and device; a message whose hash collides is counted as well. At level
 * debug every message is written. */
void tms_log_recurring(tms_log_t *log, tms_log_cause_t cause, tms_log_level_t level, const tms_error_t *error,
                       const char *consequence);
/* Writes one line for each cause and device with suppressed messages: their number and their bytes. Writes it only if the
 * number has doubled since the last summary, so that repeated failures do not flood the log; `last` writes it in any case.
 * Called at the end of each pause and resume, and at exit. */
void tms_log_summarize(tms_log_t *log, bool last);
/* In a forked child: forgets the counts and the queue, which the parent reports. */
void tms_log_after_fork_in_child(tms_log_t *log);

#endif
