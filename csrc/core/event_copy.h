/* The events for a reader: the records of the ring and what is held after the last of them, taken at one moment.
 *
 * Any thread. Takes the saver's lock, and the ring's below it, for one walk over the segments and one copy of the records.
 */
#ifndef TMS_EVENT_COPY_H
#define TMS_EVENT_COPY_H

#include "core/saver.h"

/* tms_api_t.events. */
void tms_saver_copy_events(tms_saver_t *saver, tms_events_copy_t *copy);

#endif
