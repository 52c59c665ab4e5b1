/* Segments that the program has unmapped while a call owned them (handles.h), and the addresses that it has freed since.
 *
 * The program may treat the memory as unmapped. The call that owns an orphan unmaps it at its end. Until then the driver
 * cannot free the addresses, so a free of addresses waits until there is no orphan any more.
 *
 * The saver owns the count and the list. */
#ifndef TMS_ORPHANS_H
#define TMS_ORPHANS_H

#include "core/model/saver.h"

/* Under the lock: the program has unmapped a segment that a call owns. */
static inline void tms_orphans_add(tms_saver_t *saver) { saver->orphans++; }
/* Without the lock: an orphan is unmapped, or belongs to the program again. After the last one, frees the addresses that
 * were kept. */
void tms_orphans_end(tms_saver_t *saver);
/* Keeps addresses that the program frees until there is no orphan. Returns false if there is none now: the caller frees
 * them. TMS_OUT_OF_HOST_MEMORY leaves them reserved for ever, which is logged. */
bool tms_orphans_keep(tms_saver_t *saver, uint64_t address, uint64_t bytes);

#endif
