/* The limit of this process for the size of a file (RLIMIT_FSIZE). Owns nothing; any thread, no lock. */
#ifndef TMS_SIZE_LIMIT_H
#define TMS_SIZE_LIMIT_H

#include <stdint.h>

/* Returns 0, or EFBIG if RLIMIT_FSIZE is below `end`: a write would also raise SIGXFSZ. */
int tms_size_limit_check(uint64_t end);

#endif
