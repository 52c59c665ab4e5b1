/* The log: one line a message on stderr, "torch_memory_saver[pid] level: text", written with one write(2).
 *
 * Owns nothing: the level is part of the configuration and is handed in through the thread-safe setter below. Any thread,
 * any lock held, also in a forked child and at exit. */
#ifndef TMS_LOG_H
#define TMS_LOG_H

#include <stdatomic.h>
#include <stdbool.h>

typedef enum tms_log_level {
    TMS_LOG_SILENT = 0,
    TMS_LOG_ERROR = 1,
    TMS_LOG_WARNING = 2,
    TMS_LOG_INFO = 3,
    TMS_LOG_DEBUG = 4
} tms_log_level_t;

/* Level of the process; lives in the one state (state.h). */
typedef struct tms_log {
    _Atomic int level;
} tms_log_t;

void tms_log_init(tms_log_t *log, tms_log_level_t level);
bool tms_log_enabled(const tms_log_t *log, tms_log_level_t level);
__attribute__((format(printf, 3, 4))) void tms_log_write(const tms_log_t *log, tms_log_level_t level, const char *format,
                                                         ...);

/* Says a thing once for each `said`, which the caller keeps in the state. */
#define tms_log_once(log, said, level, ...)                                                                                 \
    do {                                                                                                                    \
        if (!atomic_exchange((said), true)) tms_log_write((log), (level), __VA_ARGS__);                                     \
    } while (0)

#endif
