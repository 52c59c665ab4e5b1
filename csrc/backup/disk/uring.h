/* An io_uring of the kernel: transfers that are under way while the thread does something else. Without a library for it,
 * and asked for when the program runs: kernels before 5.11 lack it or a part of it, and containers often forbid it.
 *
 * Owns the descriptor and two mappings. One thread at a time. */
#ifndef TMS_DISK_URING_H
#define TMS_DISK_URING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* At most so many transfers may be under way. */
enum { TMS_DISK_URING_ENTRIES = 16 };

typedef struct tms_disk_uring {
    int fd; /* -1: none */
    void *rings, *entries;
    size_t rings_bytes, entries_bytes;
    void *completions;
    unsigned *submission_tail, *submission_order, *completion_head, *completion_tail;
    unsigned submission_mask, completion_mask;
} tms_disk_uring_t;

/* 0, or errno and the call that failed. Afterwards it is to be closed in either case. */
int tms_disk_uring_open(tms_disk_uring_t *uring, const char **call);
/* Closes it. False: a mapping is left that the system does not take back, for another try. No transfer may be under way. */
bool tms_disk_uring_close(tms_disk_uring_t *uring);

/* Begins a pread or pwrite. 0 or errno: nothing has begun. */
int tms_disk_uring_submit(tms_disk_uring_t *uring, bool write, int fd, void *data, uint32_t bytes, uint64_t offset,
                          void *tag);
/* Takes a transfer that has ended: what it was begun with, and bytes or a negative errno. False: there is none. */
bool tms_disk_uring_take(tms_disk_uring_t *uring, void **tag, int *result);
/* Waits until one has ended, but no longer than about `seconds`. May return early. */
void tms_disk_uring_wait(tms_disk_uring_t *uring, double seconds);

#endif
