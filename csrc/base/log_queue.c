#include "base/log_queue.h"

#include <stdlib.h>
#include <string.h>

void tms_log_queue_open(tms_log_queue_t *queue) { atomic_fetch_add(&queue->calls, 1); }

void tms_log_queue_close(tms_log_queue_t *queue) {
    int calls = atomic_load(&queue->calls);
    while (calls > 0 && !atomic_compare_exchange_weak(&queue->calls, &calls, calls - 1)) {
    }
}

bool tms_log_queue_add(tms_log_queue_t *queue, int32_t level, const char *text, size_t length) {
    if (atomic_load(&queue->calls) == 0) return false;
    tms_log_line_t *line =
        atomic_fetch_add(&queue->lines, 1) < TMS_LOG_QUEUE_LINES ? malloc(sizeof *line + length + 1) : NULL;
    if (!line) {
        atomic_fetch_sub(&queue->lines, 1);
        return false;
    }
    line->level = level;
    memcpy(line->text, text, length);
    line->text[length] = '\0';
    line->next = atomic_load(&queue->newest);
    while (!atomic_compare_exchange_weak(&queue->newest, &line->next, line)) {
    }
    return true;
}

tms_log_line_t *tms_log_queue_take(tms_log_queue_t *queue) {
    tms_log_line_t *oldest = NULL;
    for (tms_log_line_t *next, *line = atomic_exchange(&queue->newest, NULL); line; line = next) {
        next = line->next;
        line->next = oldest;
        oldest = line;
        atomic_fetch_sub(&queue->lines, 1);
    }
    return oldest;
}

void tms_log_queue_after_fork_in_child(tms_log_queue_t *queue) {
    atomic_store(&queue->calls, 0);
    for (tms_log_line_t *next, *line = tms_log_queue_take(queue); line; line = next) {
        next = line->next;
        free(line);
    }
    atomic_store(&queue->lines, 0); /* it may count a line that a thread of the parent was about to add */
}
