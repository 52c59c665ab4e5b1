/* Queries: backups, segments, counters, and the memory that was paused when a device was lost.
 *
 * Any thread. Each function takes the saver's lock and makes no driver call. */
#ifndef TMS_INSPECT_H
#define TMS_INSPECT_H

#include "core/model/saver.h"

/* These functions implement tms_api_t.host_backup, .read_only_backup, .segments, .usage, .reset_peaks, .find and
 * .counters. */
tms_status_t tms_inspect_host_backup(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer,
                                     void **host, tms_error_t *error);
tms_status_t tms_inspect_read_only_backup(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_host_buffer_t **buffer,
                                          void **host, tms_error_t *error);
size_t tms_inspect_segments(tms_saver_t *saver, tms_segment_info_t *rows, size_t capacity);
size_t tms_inspect_usage(tms_saver_t *saver, const char *tag, int device, tms_usage_info_t *rows, size_t capacity);
void tms_inspect_reset_peaks(tms_saver_t *saver);
/* Implements tms_api_t.find. */
tms_status_t tms_inspect_find(tms_saver_t *saver, uint64_t address, uint64_t bytes, tms_segment_info_t *row);
void tms_inspect_counters(tms_saver_t *saver, tms_counters_t *counters);
/* Implements tms_api_t.events: copies the records of the ring, and the amounts that are held after the last record, at one
 * moment. Takes the ring's lock below the saver's, for one walk over the segments and one copy of the records. */
void tms_inspect_copy_events(tms_saver_t *saver, tms_events_copy_t *copy);
/* If `status` is TMS_DEVICE_LOST, adds to the message how many bytes of which tags are not ACTIVE, because access to these
 * is the most common cause. Returns `status`. Called at the end of a call, with no lock held; walks the registry. */
tms_status_t tms_inspect_explain_loss(tms_saver_t *saver, tms_status_t status, tms_error_t *error);

#endif
