/* How much more host memory this process may use before something breaks: the program's own cap, the limits of the cgroups
 * it lives in, and what the system says is available.
 *
 * Owns the list of the cgroup files, found once. Reading the headroom opens files, takes no lock and may be done on any
 * thread. MemTotal is never looked at: it grows on machines that get their memory as they use it. */
#ifndef TMS_HOST_LIMIT_H
#define TMS_HOST_LIMIT_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Left free for the system and the rest of the program. */
#define TMS_HOST_FLOOR_BYTES ((uint64_t)256 << 20)

struct tms_host_cgroup;

typedef struct tms_host_limits {
    uint64_t cap_bytes;              /* of memory held for backups, pooled memory included; UINT64_MAX: none */
    uint64_t floor_bytes;            /* TMS_HOST_FLOOR_BYTES; tests use less */
    char *root;                      /* "", or where tests keep a /proc and /sys of their own */
    struct tms_host_cgroup *cgroups; /* every one on the path to the root that has a limit or may get one */
    size_t cgroup_count;
    int os_error; /* not 0: the system lacked descriptors or memory to look at all of them, and there may be more */
} tms_host_limits_t;

/* The limit that leaves the least room, for messages. */
typedef struct tms_host_headroom {
    uint64_t bytes;       /* that may still be used; 0 if the floor was passed or `call` failed; UINT64_MAX: none is known */
    uint64_t limit_bytes; /* the limit itself; 0 where `where` is the system's available memory */
    const char *call;     /* not NULL: it failed for want of descriptors or memory, so what `where` says is unknown */
    int os_error;         /* of `call` */
    char where[256];      /* "TMS_HOST_MEMORY_LIMIT_MB", "/sys/fs/cgroup/a/memory.max", "MemAvailable in /proc/meminfo" */
} tms_host_headroom_t;

/* Finds the cgroups: /proc/self/cgroup and /proc/self/mountinfo, version 1 (memory.limit_in_bytes), version 2 (memory.max
 * and memory.high) or both, every directory from the process's own up to the mount. Files that are not there or may not be
 * read set no limit. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_limits_init(tms_host_limits_t *limits, const char *root, uint64_t cap_bytes, tms_error_t *error);
void tms_host_limits_release(tms_host_limits_t *limits);

/* The room that is left now. `held_bytes`: what this process holds for backups already, which counts against the cap. The
 * page cache of a cgroup counts as free as far as the kernel would drop it (inactive_file). Limits are read anew each time:
 * they may change under a running process. One that cannot be looked at for want of descriptors or memory leaves no room. */
tms_host_headroom_t tms_host_limits_headroom(const tms_host_limits_t *limits, uint64_t held_bytes);
/* TMS_OUT_OF_HOST_MEMORY, with what is needed, what is left, who says so, and what to do; or which limit could not be looked
 * at, with the call and its errno. */
tms_status_t tms_host_headroom_fail(const tms_host_headroom_t *headroom, uint64_t needed_bytes,
                                    const tms_error_context_t *context, tms_error_t *error);

#endif
