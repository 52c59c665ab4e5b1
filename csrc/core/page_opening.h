/* The shared page is made at the first allocation of a process. On the allocating thread, with no lock held: asks the driver
 * for the UUIDs of the devices, then makes the file. A failure is logged once, and changes nothing else. */
#ifndef TMS_PAGE_OPENING_H
#define TMS_PAGE_OPENING_H

#include "core/saver.h"

/* Costs one load once the page is made, or cannot be made. */
void tms_saver_open_page(tms_saver_t *saver, const tms_driver_table_t *driver, const tms_device_table_t *devices);

#endif
