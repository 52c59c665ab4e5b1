/* How much more host memory this process may use: the program's own cap, the limits of its cgroups, and the memory that the
 * system reports as available.
 *
 * Owns the list of the cgroup files, found once. Reading the headroom opens files, takes no lock and may be done on any
 * thread. MemTotal is not used, because it grows on machines whose memory is added on demand. */
#ifndef TMS_HOST_LIMIT_H
#define TMS_HOST_LIMIT_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* The memory that is left free for the system and the rest of the program. */
#define TMS_HOST_FLOOR_BYTES ((uint64_t)256 << 20)

struct tms_host_cgroup;

typedef struct tms_host_limits {
    uint64_t cap_bytes;              /* cap on memory held for backups, pooled memory included; UINT64_MAX: none */
    uint64_t floor_bytes;            /* TMS_HOST_FLOOR_BYTES; tests use less */
    char *root;                      /* "", or the root of a test's own /proc and /sys */
    struct tms_host_cgroup *cgroups; /* all cgroups on the path to the root that have a limit or may get one */
    size_t cgroup_count;
    int os_error; /* not 0: the list may be incomplete, because the system lacked descriptors or memory */
} tms_host_limits_t;

/* The tightest limit and the room that it leaves. */
typedef struct tms_host_headroom {
    uint64_t bytes;       /* room in bytes; 0 if the floor was passed or `call` failed; UINT64_MAX: no known limit */
    uint64_t limit_bytes; /* the limit itself; 0 if `where` is the system's available memory */
    const char *call;     /* not NULL: it failed for lack of descriptors or memory, so the limit at `where` is unknown */
    int os_error;         /* of `call` */
    char where[256];      /* "TMS_HOST_MEMORY_LIMIT_MB", "/sys/fs/cgroup/a/memory.max", "MemAvailable in /proc/meminfo" */
} tms_host_headroom_t;

/* Finds the cgroups: /proc/self/cgroup and /proc/self/mountinfo, version 1 (memory.limit_in_bytes), version 2 (memory.max
 * and memory.high) or both, every directory from the process's own up to the mount. Missing and unreadable files set no
 * limit. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_limits_init(tms_host_limits_t *limits, const char *root, uint64_t cap_bytes, tms_error_t *error);
void tms_host_limits_release(tms_host_limits_t *limits);

/* The current headroom. `held_bytes`: the memory that this process already holds for backups, which counts against the cap.
 * The page cache of a cgroup counts as free if the kernel can drop it (inactive_file). Limits are read each time, because
 * they may change. A limit that cannot be read for lack of descriptors or memory leaves no headroom. */
tms_host_headroom_t tms_host_limits_headroom(const tms_host_limits_t *limits, uint64_t held_bytes);
/* Fills *error with TMS_OUT_OF_HOST_MEMORY: the bytes needed and left, the limit, and the advice; or the limit that could
 * not be read, with the call and its errno. */
tms_status_t tms_host_headroom_fail(const tms_host_headroom_t *headroom, uint64_t needed_bytes,
                                    const tms_error_context_t *context, tms_error_t *error);

#endif
