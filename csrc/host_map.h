/* Anonymous memory that is worth page-locking: on huge pages where the system has them, because the driver, the bus and
 * disks take it in fewer and larger parts then. */
#ifndef TMS_HOST_MAP_H
#define TMS_HOST_MAP_H

#include <stdint.h>

/* Of a transparent huge page: need not be right, only fast. */
#define TMS_HOST_HUGE_PAGE_BYTES ((uint64_t)2 << 20)

static inline uint64_t tms_host_round(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }
uint64_t tms_host_page_bytes(void);

/* `bytes`, whole pages of them, that nothing has touched; a forked child does not inherit them. Aligned to huge pages,
 * unless they are fewer than one. NULL, with errno. Goes with munmap. */
void *tms_host_map(uint64_t bytes);

#endif
