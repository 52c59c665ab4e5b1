/* Random bytes of the kernel. Owns nothing; any thread, no lock. */
#ifndef TMS_RANDOM_H
#define TMS_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Fills memory with random bytes, and waits for them early in the boot. Returns 0 or an errno. */
int tms_random_fill(void *memory, size_t bytes);
/* A number for the name of a file, which O_EXCL makes unique. Never waits and never fails: if the kernel has no random
 * numbers yet, the number is made from the time. */
uint64_t tms_random_number(void);

#endif
