/* Anonymous memory to be pinned. It uses huge pages if the system has them, because the driver, the bus and disks then
 * process it in fewer and larger parts. Any thread, no lock, no state. */
#ifndef TMS_HOST_MAP_H
#define TMS_HOST_MAP_H

#include <stdint.h>

/* The assumed size of a transparent huge page. A wrong value costs speed only. */
#define TMS_HOST_HUGE_PAGE_BYTES ((uint64_t)2 << 20)

static inline uint64_t tms_host_round(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }
uint64_t tms_host_page_bytes(void);

/* Maps `bytes`, whole pages that are not resident yet. A forked child does not inherit them. They are aligned to huge pages,
 * unless they are smaller than one. Returns NULL and sets errno on failure. The caller unmaps the memory with munmap. */
void *tms_host_map(uint64_t bytes);

#endif
