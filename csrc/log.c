#include "log.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A line: an error message (tms.h) and what is put around it. Longer ones are cut. */
enum { LINE_BYTES = 2048 };

void tms_log_init(tms_log_t *log, tms_log_level_t level) { atomic_store(&log->level, (int)level); }

bool tms_log_enabled(const tms_log_t *log, tms_log_level_t level) {
    return level != TMS_LOG_SILENT && (int)level <= atomic_load_explicit(&((tms_log_t *)log)->level, memory_order_relaxed);
}

static const char *level_name(tms_log_level_t level) {
    switch (level) {
    case TMS_LOG_ERROR: return "error";
    case TMS_LOG_WARNING: return "warning";
    case TMS_LOG_INFO: return "info";
    case TMS_LOG_DEBUG: return "debug";
    case TMS_LOG_SILENT: break;
    }
    return "silent";
}

/* Writes to stderr. Where stderr is a pipe that nobody reads any more, the write must not end the process: SIGPIPE is held
 * back on this thread and, if our write caused it, taken away again. */
static void write_line(const char *line, size_t length) {
    const struct timespec at_once = {0, 0};
    sigset_t broken_pipe, pending, before;
    sigemptyset(&broken_pipe);
    sigaddset(&broken_pipe, SIGPIPE);
    sigemptyset(&pending);
    sigpending(&pending);
    bool blocked = pthread_sigmask(SIG_BLOCK, &broken_pipe, &before) == 0;
    ssize_t written;
    do {
        written = write(STDERR_FILENO, line, length);
    } while (written < 0 && errno == EINTR);
    if (!blocked) return;
    if (written < 0 && errno == EPIPE && !sigismember(&pending, SIGPIPE)) {
        while (sigtimedwait(&broken_pipe, NULL, &at_once) < 0 && errno == EINTR) {
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void tms_log_write(const tms_log_t *log, tms_log_level_t level, const char *format, ...) {
    if (!tms_log_enabled(log, level)) return;
    int errno_before = errno;
    char line[LINE_BYTES];
    const size_t room = sizeof(line) - 1; /* for the newline */
    int head = snprintf(line, room, "torch_memory_saver[%ld] %s: ", (long)getpid(), level_name(level));
    size_t length = head < 0 ? 0 : (size_t)head;

    va_list arguments;
    va_start(arguments, format);
    int body = vsnprintf(line + length, room - length, format, arguments);
    va_end(arguments);
    if (body > 0) length = length + (size_t)body < room ? length + (size_t)body : room - 1;

    /* A message is one line whatever a tag or a path in it contains. */
    for (size_t i = 0; i < length; i++) {
        if (line[i] == '\n' || line[i] == '\r') line[i] = ' ';
    }
    line[length++] = '\n';
    write_line(line, length);
    errno = errno_before;
}
