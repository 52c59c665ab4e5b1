#include "backup/disk/uring.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

#ifdef __has_include
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

bool tms_disk_uring_close(tms_disk_uring_t *uring) {
    /* The descriptor is gone even if close fails. */
    if (uring->fd >= 0) (void)close(uring->fd);
    uring->fd = -1;
    if (uring->rings && munmap(uring->rings, uring->rings_bytes) == 0) uring->rings = NULL;
    if (uring->entries && munmap(uring->entries, uring->entries_bytes) == 0) uring->entries = NULL;
    return !uring->rings && !uring->entries;
}

/* The header may be older or newer than the running kernel. */
#if defined(__NR_io_uring_setup) && defined(IORING_ENTER_EXT_ARG) && defined(IORING_FEAT_EXT_ARG)

/* System calls without a function in the C library. */
static int setup(unsigned entries, struct io_uring_params *parameters) {
    return (int)syscall(__NR_io_uring_setup, entries, parameters);
}
static int enter(int fd, unsigned submit, unsigned least, unsigned flags, const void *argument, size_t bytes) {
    return (int)syscall(__NR_io_uring_enter, fd, submit, least, flags, argument, bytes);
}

static void *map(int fd, size_t bytes, off_t what) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    return memory == MAP_FAILED ? NULL : memory;
}

static void locate(tms_disk_uring_t *uring, const struct io_uring_params *parameters) {
    char *rings = uring->rings;
    uring->submission_tail = (unsigned *)(rings + parameters->sq_off.tail);
    uring->submission_order = (unsigned *)(rings + parameters->sq_off.array);
    uring->submission_mask = *(unsigned *)(rings + parameters->sq_off.ring_mask);
    uring->completion_head = (unsigned *)(rings + parameters->cq_off.head);
    uring->completion_tail = (unsigned *)(rings + parameters->cq_off.tail);
    uring->completion_mask = *(unsigned *)(rings + parameters->cq_off.ring_mask);
    uring->completions = rings + parameters->cq_off.cqes;
}

int tms_disk_uring_open(tms_disk_uring_t *uring, const char **call) {
    /* These features give one mapping for both rings, no lost completions, and waits with a timeout. Linux 5.11, which added
     * the last of them, also has reads and writes. */
    const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
    struct io_uring_params parameters = {0};
    *uring = (tms_disk_uring_t){.fd = -1};
    *call = "io_uring_setup";
    uring->fd = setup(TMS_DISK_URING_ENTRIES, &parameters);
    if (uring->fd < 0) return errno;
    if ((parameters.features & needed) != needed) return ENOSYS;
    size_t submissions = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
    size_t completions = parameters.cq_off.cqes + parameters.cq_entries * sizeof(struct io_uring_cqe);
    uring->rings_bytes = submissions > completions ? submissions : completions;
    uring->entries_bytes = parameters.sq_entries * sizeof(struct io_uring_sqe);
    *call = "mmap";
    uring->rings = map(uring->fd, uring->rings_bytes, IORING_OFF_SQ_RING);
    if (!uring->rings) return errno;
    uring->entries = map(uring->fd, uring->entries_bytes, IORING_OFF_SQES);
    if (!uring->entries) return errno;
    locate(uring, &parameters);
    return 0;
}

int tms_disk_uring_submit(tms_disk_uring_t *uring, bool write, int fd, void *data, uint32_t bytes, uint64_t offset,
                          void *tag) {
    /* The kernel reads the queue only during the call, so it is empty before and after. */
    unsigned tail = *uring->submission_tail, place = tail & uring->submission_mask;
    struct io_uring_sqe *entry = (struct io_uring_sqe *)uring->entries + place;
    *entry = (struct io_uring_sqe){.opcode = write ? IORING_OP_WRITE : IORING_OP_READ,
                                   .fd = fd,
                                   .off = offset,
                                   .addr = (uint64_t)(uintptr_t)data,
                                   .len = bytes,
                                   .user_data = (uint64_t)(uintptr_t)tag};
    uring->submission_order[place] = place;
    __atomic_store_n(uring->submission_tail, tail + 1, __ATOMIC_RELEASE);
    int taken;
    do taken = enter(uring->fd, 1, 0, 0, NULL, 0);
    while (taken < 0 && errno == EINTR);
    if (taken == 1) return 0;
    int os_error = taken < 0 ? errno : EAGAIN;
    __atomic_store_n(uring->submission_tail, tail, __ATOMIC_RELEASE);
    return os_error;
}

bool tms_disk_uring_take(tms_disk_uring_t *uring, void **tag, int *result) {
    unsigned head = *uring->completion_head;
    if (head == __atomic_load_n(uring->completion_tail, __ATOMIC_ACQUIRE)) return false;
    const struct io_uring_cqe *completion =
        (const struct io_uring_cqe *)uring->completions + (head & uring->completion_mask);
    *tag = (void *)(uintptr_t)completion->user_data;
    *result = completion->res;
    __atomic_store_n(uring->completion_head, head + 1, __ATOMIC_RELEASE);
    return true;
}

void tms_disk_uring_wait(tms_disk_uring_t *uring, double seconds) {
    struct __kernel_timespec limit = {.tv_sec = (int64_t)seconds,
                                      .tv_nsec = (int64_t)((seconds - (double)(int64_t)seconds) * TMS_NANOSECONDS)};
    struct io_uring_getevents_arg argument = {.ts = (uint64_t)(uintptr_t)&limit};
    if (enter(uring->fd, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument, sizeof argument) >= 0) return;
    if (errno == ETIME || errno == EINTR) return;
    /* This should not happen. Transfers also complete without a waiter, so the caller polls. */
    const struct timespec pause = {.tv_nsec = TMS_NANOSECONDS / 1000};
    (void)nanosleep(&pause, NULL);
}

#else

int tms_disk_uring_open(tms_disk_uring_t *uring, const char **call) {
    *uring = (tms_disk_uring_t){.fd = -1};
    *call = "io_uring_setup";
    return ENOSYS;
}

int tms_disk_uring_submit(tms_disk_uring_t *uring, bool write, int fd, void *data, uint32_t bytes, uint64_t offset,
                          void *tag) {
    (void)uring, (void)write, (void)fd, (void)data, (void)bytes, (void)offset, (void)tag;
    return ENOSYS;
}

bool tms_disk_uring_take(tms_disk_uring_t *uring, void **tag, int *result) {
    (void)uring, (void)tag, (void)result;
    return false;
}

void tms_disk_uring_wait(tms_disk_uring_t *uring, double seconds) { (void)uring, (void)seconds; }

#endif
