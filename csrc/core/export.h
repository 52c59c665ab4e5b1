/* Export of an allocation's physical memory as a file descriptor, for other processes.
 *
 * The descriptor is made at the first export of a piece of physical memory, belongs to the segment, and is closed before
 * that memory is released (segment.c), because it would keep the memory. Any thread. Takes the saver's lock, and holds it
 * during the driver's export, so that no other thread releases the memory meanwhile. */
#ifndef TMS_EXPORT_H
#define TMS_EXPORT_H

#include "core/saver.h"

/* tms_api_t.export_memory. */
tms_status_t tms_saver_export(tms_saver_t *saver, uint64_t address, tms_export_t *exported, tms_error_t *error);

#endif
