/* The shared page: a file of fixed size that shows what a process holds and does. Other processes of its user may read it at
 * any moment (`top`), and its words of requests let them ask the process for a file (`ask`). Plain data.
 *
 * Only the process itself maps its page. Other processes read and write the file by system calls, because an access to a
 * mapping beyond the end of a file that was truncated raises SIGBUS.
 *
 * Every member is made of 64-bit words, so that the writer stores each word by one atomic access. Texts are UTF-8,
 * padded with NULs, and may be truncated inside a character. Times are nanoseconds of CLOCK_MONOTONIC, 0 for "never".
 *
 * The order of memory accesses. `sequence` is even while the page is consistent, and there is one writer at a time.
 * - The writer stores an odd sequence (relaxed), each word (release), and the next even sequence (release).
 * - A reader reads the sequence, the whole page, and the sequence again, with an acquire fence after each. Its copy counts
 * if both sequences are equal and even.
 *
 * A reader that reads a word of a write synchronises with that store. So it finds the odd sequence before the store, or a
 * later one, when it reads the sequence again. A reader that reads the even sequence of a write finds all of its words. So
 * two equal even sequences enclose no write. `requests`, `served_total`, `unserved_total` and `serve_error` are outside of
 * this order.
 *
 * The file is locked (flock) while its process lives. A process that gets the lock knows that the owner is dead, even if the
 * owner was in another PID namespace. A change of this layout is a new TMS_SHARED_PAGE_FORMAT. */
#ifndef TMS_SHARED_PAGE_FORMAT_H
#define TMS_SHARED_PAGE_FORMAT_H

#include <stdint.h>

#define TMS_SHARED_PAGE_MAGIC UINT64_C(0x454741505f534d54) /* "TMS_PAGE" */

enum {
    TMS_SHARED_PAGE_FORMAT = 4,
    TMS_SHARED_PAGE_BYTES = 32768,  /* size of the file */
    TMS_SHARED_PAGE_ROWS = 128,     /* pairs of tag and device; further ones are summed in `others` */
    TMS_SHARED_PAGE_DEVICES = 64,   /* devices of the process, by ordinal */
    TMS_SHARED_PAGE_TEXT_WORDS = 8, /* words of a tag or a name: 64 bytes */
    TMS_SHARED_PAGE_UUID_WORDS = 2
};

/* The requests of other processes. The number of a request is an index of `requests` and of the counters. Each request has a
 * word of its own, so that another process makes it by one write to the file. */
#define TMS_SHARED_PAGE_REQUESTS(X)                                                                                         \
    X(SNAPSHOT, 0, "snapshot")                                                                                              \
    X(EVENTS, 1, "events")
enum {
#define TMS_SHARED_PAGE_REQUEST(kind, number, name) TMS_SHARED_PAGE_##kind = (number),
    TMS_SHARED_PAGE_REQUESTS(TMS_SHARED_PAGE_REQUEST)
#undef TMS_SHARED_PAGE_REQUEST
        TMS_SHARED_PAGE_KINDS
};

/* The numbers of a row. `resident_bytes` and `paused_bytes` are sizes of address ranges. The counters include only pauses
 * and resumes that concerned an allocation of the row. The times say when the last successful call committed, and how long
 * it took. */
#define TMS_SHARED_PAGE_ROW_NUMBERS(X)                                                                                      \
    X(allocations) /* allocations that are alive, in every state */                                                         \
    X(damaged)     /* of them in state DAMAGED */                                                                           \
    X(resident_bytes)                                                                                                       \
    X(paused_bytes)                                                                                                         \
    X(slack_bytes) /* memory of freed allocations that their runs still hold; in no other number */                         \
    X(host_backup_bytes)                                                                                                    \
    X(disk_backup_bytes)                                                                                                    \
    X(shared_backup_bytes) /* by the shared store, whose objects other processes may hold as well */                        \
    X(pauses_total)                                                                                                         \
    X(resumes_total)                                                                                                        \
    X(failed_pauses_total)                                                                                                  \
    X(failed_resumes_total)                                                                                                 \
    X(failed_allocations_total)                                                                                             \
    X(last_pause_ended)                                                                                                     \
    X(last_pause_nanoseconds)                                                                                               \
    X(last_resume_ended)                                                                                                    \
    X(last_resume_nanoseconds)

/* The numbers of the process. The numbers before `row_count` change rarely. */
#define TMS_SHARED_PAGE_NUMBERS(X)                                                                                          \
    X(pid)                                                                                                                  \
    X(pid_namespace)   /* inode of /proc/self/ns/pid; 0: unknown */                                                         \
    X(process_started) /* clock ticks after the boot, as in /proc/<pid>/stat; 0: unknown */                                 \
    X(made)            /* time */                                                                                           \
    X(device_count)                                                                                                         \
    X(rank_known)                                                                                                           \
    X(rank)                                                                                                                 \
    X(serves) /* 1: requests are served after each pause and resume */                                                      \
    X(row_count)                                                                                                            \
    X(running)       /* tms_shared_page_call_t: allocations are being moved */                                              \
    X(running_since) /* time */                                                                                             \
    X(allocations_total)                                                                                                    \
    X(frees_total)                                                                                                          \
    X(pauses_total) /* calls that succeeded */                                                                              \
    X(resumes_total)                                                                                                        \
    X(failed_pauses_total)                                                                                                  \
    X(failed_resumes_total)                                                                                                 \
    X(failed_allocations_total)                                                                                             \
    X(last_pause_ended) /* of a call that succeeded */                                                                      \
    X(last_pause_nanoseconds)                                                                                               \
    X(last_resume_ended)                                                                                                    \
    X(last_resume_nanoseconds)

typedef enum tms_shared_page_call {
    TMS_SHARED_PAGE_IDLE = 0,
    TMS_SHARED_PAGE_PAUSE = 1,
    TMS_SHARED_PAGE_RESUME = 2
} tms_shared_page_call_t;

#define TMS_SHARED_PAGE_MEMBER(name) uint64_t name;

typedef struct tms_shared_page_row {
    uint64_t tag[TMS_SHARED_PAGE_TEXT_WORDS]; /* zeros: none */
    uint64_t device;                          /* CUDA ordinal */
    TMS_SHARED_PAGE_ROW_NUMBERS(TMS_SHARED_PAGE_MEMBER)
} tms_shared_page_row_t;

typedef struct tms_shared_page_device {
    uint64_t uuid[TMS_SHARED_PAGE_UUID_WORDS]; /* the driver's 16 bytes; zeros: unknown */
    uint64_t total_bytes;
} tms_shared_page_device_t;

typedef struct tms_shared_page_process {
    uint64_t boot_id[TMS_SHARED_PAGE_UUID_WORDS]; /* the kernel's identifier of the boot, 16 bytes */
    uint64_t name[TMS_SHARED_PAGE_TEXT_WORDS];    /* the name of the program, or of its role */
    TMS_SHARED_PAGE_NUMBERS(TMS_SHARED_PAGE_MEMBER)
} tms_shared_page_process_t;

typedef struct tms_shared_page_contents {
    uint64_t magic, format; /* written last; 0 until then */
    uint64_t sequence;
    uint64_t requests[TMS_SHARED_PAGE_KINDS]; /* 1: made by another process; 0: withdrawn, or answered by this one */
    uint64_t served_total[TMS_SHARED_PAGE_KINDS], unserved_total[TMS_SHARED_PAGE_KINDS];
    uint64_t serve_error[TMS_SHARED_PAGE_KINDS]; /* errno of the last failure; 0 if the system reported none */
    tms_shared_page_process_t process;
    tms_shared_page_device_t devices[TMS_SHARED_PAGE_DEVICES];
    tms_shared_page_row_t others; /* without tag and device */
    tms_shared_page_row_t rows[TMS_SHARED_PAGE_ROWS];
} tms_shared_page_contents_t;

_Static_assert(sizeof(tms_shared_page_contents_t) <= TMS_SHARED_PAGE_BYTES, "the contents fit into the file");
_Static_assert(sizeof(_Atomic uint64_t) == sizeof(uint64_t), "a word is accessed as an atomic");

#endif
