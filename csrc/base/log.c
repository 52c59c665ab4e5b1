#include "base/log.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/status.h"

/* The maximum length of a line: an error message (tms.h) with its prefix. Longer lines are truncated. */
enum { LINE_BYTES = 2048 };

void tms_log_init(tms_log_t *log, tms_log_level_t level) {
    atomic_store(&log->level, (int)level);
    log->queue = NULL;
    tms_log_after_fork_in_child(log);
}

bool tms_log_enabled(const tms_log_t *log, tms_log_level_t level) {
    return level != TMS_LOG_SILENT && (int)level <= atomic_load_explicit(&log->level, memory_order_relaxed);
}

/* Nothing is written at TMS_LOG_SILENT. */
static const char *const level_names[] = {
    [TMS_LOG_ERROR] = "error", [TMS_LOG_WARNING] = "warning", [TMS_LOG_INFO] = "info", [TMS_LOG_DEBUG] = "debug"};

/* Writes to stderr. If stderr is a pipe without a reader, the write must not end the process: SIGPIPE is blocked on this
 * thread and, if this write raised it, consumed. */
static void write_line(const char *line, size_t length) {
    const struct timespec at_once = {0, 0};
    sigset_t broken_pipe, pending, before;
    sigemptyset(&broken_pipe);
    sigaddset(&broken_pipe, SIGPIPE);
    sigemptyset(&pending);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &broken_pipe, &before);
    ssize_t written;
    do {
        written = write(STDERR_FILENO, line, length);
        if (written > 0) {
            line += written;
            length -= (size_t)written;
        }
    } while (length > 0 && (written > 0 || (written < 0 && errno == EINTR)));
    if (written < 0 && errno == EPIPE && !sigismember(&pending, SIGPIPE)) {
        while (sigtimedwait(&broken_pipe, NULL, &at_once) < 0 && errno == EINTR) {
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void tms_log_write_stderr(tms_log_level_t level, const char *text) {
    char line[LINE_BYTES];
    const size_t room = sizeof line - 1; /* for the newline */
    int written = snprintf(line, room, "torch_memory_saver[%ld] %s: %s", (long)getpid(), level_names[level], text);
    size_t length = written < 0 ? 0 : (size_t)written < room ? (size_t)written : room - 1;
    line[length++] = '\n';
    write_line(line, length);
}

void tms_log_write(const tms_log_t *log, tms_log_level_t level, const char *format, ...) {
    if (!tms_log_enabled(log, level)) return;
    int errno_before = errno;
    char text[LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    size_t length = written < 0 ? 0 : (size_t)written < sizeof text ? (size_t)written : sizeof text - 1;
    text[length] = '\0';

    /* A message stays one line even if a tag or a path contains a line break. */
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '\n' || text[i] == '\r') text[i] = ' ';
    }
    if (!log->queue || !tms_log_queue_add(log->queue, (int32_t)level, text, length)) tms_log_write_stderr(level, text);
    errno = errno_before;
}

void tms_log_at_exit(const tms_log_t *log) {
    for (tms_log_line_t *next, *line = log->queue ? tms_log_queue_take(log->queue) : NULL; line; line = next) {
        next = line->next;
        tms_log_write_stderr((tms_log_level_t)line->level, line->text);
        free(line);
    }
}

/* ---- causes that recur ---- */

static const char *const cause_texts[] = {
#define CAUSE_TEXT(name, text) text,
    TMS_LOG_CAUSES(CAUSE_TEXT)
#undef CAUSE_TEXT
};

void tms_log_after_fork_in_child(tms_log_t *log) {
    for (int cause = 0; cause < TMS_LOG_CAUSE_COUNT; cause++) {
        for (int i = 0; i < TMS_LOG_DEVICES; i++) {
            tms_log_recurrence_t *one = &log->recurrences[cause][i];
            atomic_store(&one->written, 0);
            atomic_store(&one->count, 0);
            atomic_store(&one->bytes, 0);
            atomic_store(&one->summarized, 0);
        }
    }
    atomic_store(&log->recurred, false);
    if (log->queue) tms_log_queue_after_fork_in_child(log->queue);
}

/* Returns the bit of an error, selected by a hash of the failed call and its result. */
static uint64_t bit_of(const tms_error_t *error) {
    enum { TOP_SIX_BITS = 58 };
    uint64_t hash = tms_hash_bytes(TMS_HASH_START, error->call, strlen(error->call));
    hash = tms_hash_number(hash, (uint32_t)error->status);
    hash = tms_hash_number(hash, (uint32_t)error->driver_result);
    hash = tms_hash_number(hash, (uint32_t)error->os_error);
    return (uint64_t)1 << (hash >> TOP_SIX_BITS);
}

void tms_log_recurring(tms_log_t *log, tms_log_cause_t cause, tms_log_level_t level, const tms_error_t *error,
                       const char *consequence) {
    bool has_device = error->device >= 0 && error->device < TMS_LOG_DEVICES - 1;
    tms_log_recurrence_t *one = &log->recurrences[cause][has_device ? error->device + 1 : 0];
    uint64_t bit = bit_of(error);
    if (!(atomic_fetch_or(&one->written, bit) & bit) || tms_log_enabled(log, TMS_LOG_DEBUG)) {
        tms_log_write(log, level, "%s%s%s", error->message, *consequence ? " " : "", consequence);
        return;
    }
    atomic_fetch_add(&one->bytes, error->bytes);
    atomic_fetch_add(&one->count, 1);
    atomic_store(&log->recurred, true);
}

static void summarize(const tms_log_t *log, int cause, int device, tms_log_recurrence_t *one, bool last) {
    enum { FACTOR = 2 };
    char where[sizeof "device -2147483648: "] = "";
    uint64_t count = atomic_load(&one->count), summarized = atomic_load(&one->summarized);
    if (count == summarized || (!last && count < FACTOR * summarized)) return;
    if (!atomic_compare_exchange_strong(&one->summarized, &summarized, count)) return; /* another thread writes it */
    if (device >= 0) snprintf(where, sizeof where, "device %d: ", device);
    tms_error_t bytes; /* not an error: only used to write the size */
    tms_error_clear(&bytes);
    tms_error_append_bytes(&bytes, atomic_load(&one->bytes));
    tms_log_write(log, TMS_LOG_WARNING, "%s%s: %llu more time%s since that was logged, %s in total", where,
                  cause_texts[cause], (unsigned long long)count, count == 1 ? "" : "s", bytes.message);
}

void tms_log_summarize(tms_log_t *log, bool last) {
    if (!atomic_exchange(&log->recurred, false) && !last) return;
    for (int cause = 0; cause < TMS_LOG_CAUSE_COUNT; cause++) {
        for (int i = 0; i < TMS_LOG_DEVICES; i++) summarize(log, cause, i - 1, &log->recurrences[cause][i], last);
    }
}
