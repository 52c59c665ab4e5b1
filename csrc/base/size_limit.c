#include "base/size_limit.h"

#include <errno.h>
#include <sys/resource.h>

int tms_size_limit_check(uint64_t end) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return 0;
    return end > limit.rlim_cur ? EFBIG : 0;
}
