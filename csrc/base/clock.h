/* The monotonic clock, which all processes of a machine share (CLOCK_MONOTONIC). Any thread; no lock. */
#ifndef TMS_CLOCK_H
#define TMS_CLOCK_H

#include <stdint.h>
#include <time.h>

enum { TMS_NANOSECONDS = 1000000000 }; /* per second */

static inline uint64_t tms_clock_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * TMS_NANOSECONDS + (uint64_t)now.tv_nsec;
}

#endif
