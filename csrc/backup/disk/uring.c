#include "backup/disk/uring.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "backup/disk/uring_abi.h"
#include "base/clock.h"

bool tms_disk_uring_close(tms_disk_uring_t *uring) {
    /* The descriptor is gone even if close fails. */
    if (uring->fd >= 0) (void)close(uring->fd);
    uring->fd = -1;
    if (uring->rings && munmap(uring->rings, uring->rings_bytes) == 0) uring->rings = NULL;
    if (uring->entries && munmap(uring->entries, uring->entries_bytes) == 0) uring->entries = NULL;
    return !uring->rings && !uring->entries;
}

/* System calls without a function in the C library. */
static int setup(unsigned entries, tms_uring_parameters_t *parameters) {
    return (int)syscall(__NR_io_uring_setup, entries, parameters);
}
static int enter(int fd, unsigned submit, unsigned least, unsigned flags, const void *argument, size_t bytes) {
    return (int)syscall(__NR_io_uring_enter, fd, submit, least, flags, argument, bytes);
}

static void *map(int fd, size_t bytes, off_t what) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    return memory == MAP_FAILED ? NULL : memory;
}

static void locate(tms_disk_uring_t *uring, const tms_uring_parameters_t *parameters) {
    char *rings = uring->rings;
    uring->submission_tail = (unsigned *)(rings + parameters->submission.tail);
    uring->submission_order = (unsigned *)(rings + parameters->submission.array);
    uring->submission_mask = *(unsigned *)(rings + parameters->submission.mask);
    uring->completion_head = (unsigned *)(rings + parameters->completion.head);
    uring->completion_tail = (unsigned *)(rings + parameters->completion.tail);
    uring->completion_mask = *(unsigned *)(rings + parameters->completion.mask);
    uring->completions = rings + parameters->completion.completions;
}

int tms_disk_uring_open(tms_disk_uring_t *uring, const char **call) {
    /* These features give one mapping for both rings, no lost completions, and waits with a timeout. Linux 5.11, which added
     * the last of them, also has reads and writes. */
    const unsigned needed = TMS_URING_SINGLE_MMAP | TMS_URING_NODROP | TMS_URING_EXT_ARG;
    tms_uring_parameters_t parameters = {0};
    *uring = (tms_disk_uring_t){.fd = -1};
    *call = "io_uring_setup";
    uring->fd = setup(TMS_DISK_URING_ENTRIES, &parameters);
    if (uring->fd < 0) return errno;
    if ((parameters.features & needed) != needed) return ENOSYS;
    size_t submissions = parameters.submission.array + parameters.submission_entries * sizeof(unsigned);
    size_t completions = parameters.completion.completions + parameters.completion_entries * sizeof(tms_uring_completion_t);
    uring->rings_bytes = submissions > completions ? submissions : completions;
    uring->entries_bytes = parameters.submission_entries * sizeof(tms_uring_entry_t);
    *call = "mmap";
    uring->rings = map(uring->fd, uring->rings_bytes, TMS_URING_RINGS);
    if (!uring->rings) return errno;
    uring->entries = map(uring->fd, uring->entries_bytes, TMS_URING_ENTRIES);
    if (!uring->entries) return errno;
    locate(uring, &parameters);
    return 0;
}

int tms_disk_uring_submit(tms_disk_uring_t *uring, bool write, int fd, void *data, uint32_t bytes, uint64_t offset,
                          void *tag) {
    /* The kernel reads the queue only during the call, so it is empty before and after. */
    unsigned tail = *uring->submission_tail, place = tail & uring->submission_mask;
    tms_uring_entry_t *entry = (tms_uring_entry_t *)uring->entries + place;
    *entry = (tms_uring_entry_t){.opcode = write ? TMS_URING_WRITE : TMS_URING_READ,
                                 .fd = fd,
                                 .offset = offset,
                                 .address = (uint64_t)(uintptr_t)data,
                                 .bytes = bytes,
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
    const tms_uring_completion_t *completion =
        (const tms_uring_completion_t *)uring->completions + (head & uring->completion_mask);
    *tag = (void *)(uintptr_t)completion->user_data;
    *result = completion->result;
    __atomic_store_n(uring->completion_head, head + 1, __ATOMIC_RELEASE);
    return true;
}

void tms_disk_uring_wait(tms_disk_uring_t *uring, double seconds) {
    int64_t whole = (int64_t)seconds, limit[] = {whole, (int64_t)((seconds - (double)whole) * TMS_NANOSECONDS)};
    tms_uring_wait_t argument = {.limit = (uint64_t)(uintptr_t)limit};
    if (enter(uring->fd, 0, 1, TMS_URING_ENTER_GETEVENTS | TMS_URING_ENTER_EXT_ARG, &argument, sizeof argument) >= 0) return;
    if (errno == ETIME || errno == EINTR) return;
    /* This should not happen. Transfers also complete without a waiter, so the caller polls. */
    const struct timespec pause = {.tv_nsec = TMS_NANOSECONDS / 1000};
    (void)nanosleep(&pause, NULL);
}
