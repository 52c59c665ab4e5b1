/* Lines of the log that wait for a caller who takes them, instead of going to stderr: the Python package passes them to
 * `logging`.
 *
 * The queue is open while at least one call is under way whose caller takes the lines afterwards. It gets the lines of all
 * threads. A line goes to stderr if the queue is closed or full, or if there is no host memory: so no line waits unless a
 * call is going to take it. Lines that are left when the process exits are written to stderr. A forked child forgets its
 * parent's lines, which the parent delivers.
 *
 * Lock-free: any thread, with any lock held, in a forked child and at exit. */
#ifndef TMS_LOG_QUEUE_H
#define TMS_LOG_QUEUE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "include/tms.h"

/* A call writes fewer lines than that, unless something is wrong with every allocation. */
enum { TMS_LOG_QUEUE_LINES = 256 };

typedef struct tms_log_queue {
    _Atomic int calls;                /* number of calls under way; 0: the queue is closed */
    _Atomic int lines;                /* number of lines that are in the list or about to be added */
    _Atomic(tms_log_line_t *) newest; /* head of the list, whose newest line comes first */
} tms_log_queue_t;

void tms_log_queue_open(tms_log_queue_t *queue);
/* Called at the end of a call that has opened the queue. In a forked child, the end of a call of the parent does nothing. */
void tms_log_queue_close(tms_log_queue_t *queue);
/* Returns false if the line must go to stderr. */
bool tms_log_queue_add(tms_log_queue_t *queue, int32_t level, const char *text, size_t length);
/* Takes all lines, the oldest first. The caller frees each. */
tms_log_line_t *tms_log_queue_take(tms_log_queue_t *queue);
void tms_log_queue_after_fork_in_child(tms_log_queue_t *queue);

#endif
