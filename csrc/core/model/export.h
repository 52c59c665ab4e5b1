/* Export of the physical memory of an allocation as a file descriptor, for other processes.
 *
 * The exported memory is that of a whole run (core/model/run.h). Its descriptor is made at the first export, belongs to the
 * run, and is closed before the memory is released, because an open descriptor would keep the memory. An importer keeps all
 * of the run. So once memory of a kind was exported, a resume gives each segment of the kind a handle of its own. Any
 * thread. Takes the saver's lock, and holds it during the driver's export, so that no other thread releases the memory
 * during the export. */
#ifndef TMS_EXPORT_H
#define TMS_EXPORT_H

#include "core/model/saver.h"

/* tms_api_t.export_memory. */
tms_status_t tms_export_memory(tms_saver_t *saver, uint64_t address, tms_export_t *exported, tms_error_t *error);

#endif
