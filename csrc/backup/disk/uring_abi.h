/* The part of the kernel's io_uring interface that uring.c uses. The kernel never changes these layouts and numbers. The
 * system's header is not used, because it may be older than the running kernel, above all where wheels are built. */
#ifndef TMS_DISK_URING_ABI_H
#define TMS_DISK_URING_ABI_H

#include <stdint.h>
#include <sys/syscall.h>

/* Every processor but Alpha has these numbers. */
#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

enum { TMS_URING_READ = 22, TMS_URING_WRITE = 23 };                                   /* opcodes */
enum { TMS_URING_SINGLE_MMAP = 1, TMS_URING_NODROP = 2, TMS_URING_EXT_ARG = 1 << 8 }; /* features of a ring */
enum { TMS_URING_ENTER_GETEVENTS = 1, TMS_URING_ENTER_EXT_ARG = 1 << 3 };             /* flags of io_uring_enter */
enum { TMS_URING_RINGS = 0, TMS_URING_ENTRIES = 0x10000000 };                         /* what mmap maps, as an offset */

/* A request. */
typedef struct tms_uring_entry {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t bytes, options;
    uint64_t user_data;
    uint64_t others[3];
} tms_uring_entry_t;

/* The result of a request. */
typedef struct tms_uring_completion {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
} tms_uring_completion_t;

/* The places of the parts of a ring in the mapping of both rings. */
typedef struct tms_uring_submission_offsets {
    uint32_t head, tail, mask, entries, flags, dropped, array, reserved[3];
} tms_uring_submission_offsets_t;

typedef struct tms_uring_completion_offsets {
    uint32_t head, tail, mask, entries, overflow, completions, flags, reserved[3];
} tms_uring_completion_offsets_t;

typedef struct tms_uring_parameters {
    uint32_t submission_entries, completion_entries, flags, thread_processor, thread_idle, features, workers_fd, reserved[3];
    tms_uring_submission_offsets_t submission;
    tms_uring_completion_offsets_t completion;
} tms_uring_parameters_t;

/* The limit of a wait. `limit` is the address of two int64_t: seconds and nanoseconds. */
typedef struct tms_uring_wait {
    uint64_t signals;
    uint32_t signals_bytes, reserved;
    uint64_t limit;
} tms_uring_wait_t;

#endif
