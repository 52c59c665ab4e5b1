#include "base/random.h"

#include <errno.h>
#include <sys/random.h>

#include "base/clock.h"

int tms_random_fill(void *memory, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = getrandom((char *)memory + done, bytes - done, 0);
        if (got < 0 && errno != EINTR) return errno;
        if (got > 0) done += (size_t)got;
    }
    return 0;
}

uint64_t tms_random_number(void) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof(number), GRND_NONBLOCK) == (ssize_t)sizeof(number)) return number;
    return tms_clock_nanoseconds() ^ (uint64_t)(uintptr_t)&number;
}
