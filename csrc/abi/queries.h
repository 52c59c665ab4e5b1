/* The functions of the table that tell what is managed: allocations, usage, tags, counters, events.
 *
 * Any thread. Each makes no driver call, except export_memory and count_guard_bytes, and takes the lock of what it asks,
 * which it names itself. Without a state nothing is managed. */
#ifndef TMS_QUERIES_H
#define TMS_QUERIES_H

#include "include/tms.h"

size_t tms_query_segments(tms_segment_info_t *rows, size_t capacity);
size_t tms_query_usage(const char *tag, int32_t device, tms_usage_info_t *rows, size_t capacity);
void tms_query_reset_peaks(void);
tms_status_t tms_query_find(uint64_t address, tms_segment_info_t *row);
tms_status_t tms_query_export_memory(uint64_t address, tms_export_t *exported, tms_error_t *error);
void tms_query_tag_info(const char *tag, tms_tag_info_t *info);
tms_status_t tms_query_read_backup(const tms_selection_t *selection, uint64_t address, uint64_t bytes, void *destination,
                                   int32_t *found, tms_error_t *error);
tms_status_t tms_query_count_guard_bytes(const tms_selection_t *selection, const tms_live_range_t *ranges,
                                         size_t range_count, uint64_t *counts, tms_error_t *error);
size_t tms_query_tags(tms_tag_row_t *rows, size_t capacity);
void tms_query_counters(tms_counters_t *counters);
void tms_query_events(tms_events_copy_t *copy);
void tms_query_set_event_samples(int32_t on);
size_t tms_query_libraries(tms_library_info_t *rows, size_t capacity);

#endif
