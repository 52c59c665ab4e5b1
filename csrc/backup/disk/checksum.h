/* CRC-32C (Castagnoli): the checksum of the contents of backup files, so that changed contents never reach the GPU. It
 * guards against accidents, not against an attacker, who could compute a matching change.
 *
 * Uses the CPU's instruction if it has one (chosen at run time), else tables. Any thread, no lock, no state. */
#ifndef TMS_CHECKSUM_H
#define TMS_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint32_t tms_checksum_t(const void *data, size_t bytes);

/* The faster function for this CPU. Callers keep the result: querying the CPU takes microseconds in a virtual machine. */
tms_checksum_t *tms_checksum_choose(void);

/* The two functions to choose from. Public for the tests. */
uint32_t tms_checksum_by_table(const void *data, size_t bytes);
bool tms_checksum_has_instruction(void);
uint32_t tms_checksum_by_instruction(const void *data, size_t bytes); /* requires the instruction */

#endif
