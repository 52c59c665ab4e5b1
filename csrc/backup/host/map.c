#include "backup/host/map.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

uint64_t tms_host_page_bytes(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

/* Aligned to huge pages: what is mapped before and behind is given back. */
static void *map_aligned(uint64_t bytes) {
    /* No accounting: on a machine whose memory grows with its use the system would refuse more than it has now. limit.h
     * says how much may be used. */
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (bytes < TMS_HOST_HUGE_PAGE_BYTES) return mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    uint64_t wanted = bytes + TMS_HOST_HUGE_PAGE_BYTES;
    if (wanted < bytes) return errno = ENOMEM, MAP_FAILED;
    char *memory = mmap(NULL, wanted, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) return MAP_FAILED;
    char *aligned = (char *)(uintptr_t)tms_host_round((uintptr_t)memory, TMS_HOST_HUGE_PAGE_BYTES);
    uint64_t before = (uint64_t)(aligned - memory), after = wanted - before - bytes;
    /* Addresses that the system does not take back cost nothing. */
    if (before) (void)munmap(memory, before);
    if (after) (void)munmap(aligned + bytes, after);
    return aligned;
}

void *tms_host_map(uint64_t bytes) {
    void *memory = map_aligned(bytes);
    if (memory == MAP_FAILED) return NULL;
    /* A forked child has no use for a copy of tens of GiB, not even a lazy one, whose copy-on-write could also move pages of
     * this process that a device copies to. Where this is refused, nothing else is lost. */
    (void)madvise(memory, bytes, MADV_DONTFORK);
    if (bytes >= TMS_HOST_HUGE_PAGE_BYTES)
        (void)madvise(memory, bytes, MADV_HUGEPAGE); /* a refusal is noticed when the memory is prefaulted */
    return memory;
}
