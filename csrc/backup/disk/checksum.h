/* CRC-32C (Castagnoli): the checksum of what lies in backup files, so that changed contents never reach the GPU. It
 * guards against accidents, not against an attacker, who could compute a matching change.
 *
 * The CPU's own instruction where it has one (chosen at run time), else tables. Any thread, no state. */
#ifndef TMS_CHECKSUM_H
#define TMS_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint32_t tms_checksum_t(const void *data, size_t bytes);

/* The faster one of this CPU. To be kept: asking the CPU takes microseconds in a virtual machine. */
tms_checksum_t *tms_checksum_choose(void);

/* The two behind it. Public for the tests. */
uint32_t tms_checksum_by_table(const void *data, size_t bytes);
bool tms_checksum_has_instruction(void);
uint32_t tms_checksum_by_instruction(const void *data, size_t bytes); /* only where the CPU has it */

#endif
