/* An io_uring: asynchronous transfers by the kernel. Uses the system calls directly, and checks for them at run time:
 * kernels before 5.11 lack it or a part of it, and containers often forbid it.
 *
 * Owns the descriptor and two mappings. Only one thread at a time uses it, without a lock. */
#ifndef TMS_DISK_URING_H
#define TMS_DISK_URING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The maximum number of transfers in flight. */
enum { TMS_DISK_URING_ENTRIES = 16 };

typedef struct tms_disk_uring {
    int fd; /* -1: none */
    void *rings, *entries;
    size_t rings_bytes, entries_bytes;
    void *completions;
    unsigned *submission_tail, *submission_order, *completion_head, *completion_tail;
    unsigned submission_mask, completion_mask;
} tms_disk_uring_t;

/* Returns 0, or errno with *call set. The ring must be closed in either case. */
int tms_disk_uring_open(tms_disk_uring_t *uring, const char **call);
/* Closes the ring; no transfer may be in flight. Returns false if a mapping could not be released; the caller may retry. */
bool tms_disk_uring_close(tms_disk_uring_t *uring);

/* Begins a pread or pwrite. Returns 0, or errno if nothing has begun. */
int tms_disk_uring_submit(tms_disk_uring_t *uring, bool write, int fd, void *data, uint32_t bytes, uint64_t offset,
                          void *tag);
/* Takes a completed transfer and sets its *tag and its *result, a number of bytes or a negative errno. Returns false if
 * there is none. */
bool tms_disk_uring_take(tms_disk_uring_t *uring, void **tag, int *result);
/* Waits until a transfer has completed, at most about `seconds`. May return early. */
void tms_disk_uring_wait(tms_disk_uring_t *uring, double seconds);

#endif
