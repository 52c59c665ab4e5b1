#include "backup/host/map.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

uint64_t tms_host_page_bytes(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

/* Maps memory that is aligned to huge pages: maps more, and unmaps the parts before and after. */
static void *map_aligned(uint64_t bytes) {
    /* The system must not account for this memory: on a machine whose memory is added on demand, it would reject more than
     * it has now. limit.h checks the limits instead. */
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (bytes < TMS_HOST_HUGE_PAGE_BYTES) return mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    uint64_t wanted = bytes + TMS_HOST_HUGE_PAGE_BYTES;
    if (wanted < bytes) return errno = ENOMEM, MAP_FAILED;
    char *memory = mmap(NULL, wanted, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) return MAP_FAILED;
    char *aligned = (char *)(uintptr_t)tms_host_round((uintptr_t)memory, TMS_HOST_HUGE_PAGE_BYTES);
    uint64_t before = (uint64_t)(aligned - memory), after = wanted - before - bytes;
    /* A failure is ignored, because addresses that stay mapped cost nothing. */
    if (before) (void)munmap(memory, before);
    if (after) (void)munmap(aligned + bytes, after);
    return aligned;
}

void *tms_host_map(uint64_t bytes) {
    void *memory = map_aligned(bytes);
    if (memory == MAP_FAILED) return NULL;
    /* A forked child needs no copy, and copy-on-write could move pages of this process that a device copies to. A failure
     * matters only in a process that forks. */
    (void)madvise(memory, bytes, MADV_DONTFORK);
    if (bytes >= TMS_HOST_HUGE_PAGE_BYTES)
        (void)madvise(memory, bytes, MADV_HUGEPAGE); /* a failure is detected when the memory is prefaulted */
    return memory;
}
