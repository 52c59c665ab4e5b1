/* Random bytes of the kernel, and cheap numbers that need not be random. Owns nothing; any thread, no lock. */
#ifndef TMS_RANDOM_H
#define TMS_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Fills memory with random bytes, and waits for them early in the boot. Returns 0 or an errno. */
int tms_random_fill(void *memory, size_t bytes);
/* A number for the name of a file, which O_EXCL makes unique. Never waits and never fails: if the kernel has no random
 * numbers yet, the number is made from the time. */
uint64_t tms_random_number(void);

/* Returns the next number of Marsaglia's xorshift generator, whose state is never 0. */
static inline uint32_t tms_random_next(uint32_t *state) {
    enum { SHIFT_A = 13, SHIFT_B = 17, SHIFT_C = 5 };
    *state ^= *state << SHIFT_A;
    *state ^= *state >> SHIFT_B;
    *state ^= *state << SHIFT_C;
    return *state;
}

#endif
