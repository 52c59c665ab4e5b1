#include "core/transition/guard_bytes.h"

#include <errno.h>
#include <stdlib.h>

#include "core/transition/completion.h"
#include "core/transition/crew.h"
#include "core/transition/save.h"
#include "core/transition/steps.h"

typedef struct sample {
    tms_transition_t t; /* first */
    const tms_live_range_t *ranges;
    size_t range_count;
    uint64_t *counts;
    tms_backup_t *copies; /* copies of the segments on the list, in its order */
} sample_t;

/* Whether the range lies in the segment. A part of it does not count. */
static bool holds(const tms_segment_t *segment, const tms_live_range_t *range) {
    uint64_t begin = tms_segment_address(segment);
    return range->begin >= begin && range->end <= begin + segment->bytes;
}

/* Returns the first range that may lie in the segment. The ranges that lie in it follow each other. */
static size_t first_range(const sample_t *sample, const tms_segment_t *segment) {
    size_t low = 0, high = sample->range_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (sample->ranges[middle].begin < tms_segment_address(segment))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Returns the ranges in the segment, in the form in which a backup's content is chosen. `address` is storage for the
 * result. */
static tms_live_t ranges_of(const sample_t *sample, const tms_segment_t *segment, uint64_t *address) {
    size_t first = first_range(sample, segment), last = first;
    while (last < sample->range_count && holds(segment, &sample->ranges[last])) last++;
    *address = tms_segment_address(segment);
    return (tms_live_t){
        .allocations = address, .allocation_count = 1, .ranges = sample->ranges + first, .range_count = last - first};
}

/* Plans the copies. *copying becomes the devices that own a segment with ranges. */
static tms_status_t plan_all(sample_t *sample, tms_device_mask_t *copying, tms_error_t *error) {
    tms_transition_t *t = &sample->t;
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_backup_t *copy = sample->copies;
    TMS_FOR_EACH(segment, t) {
        uint64_t address;
        tms_live_t ranges = ranges_of(sample, segment, &address);
        *copy = (tms_backup_t){.kind = TMS_BACKUP_PINNED, .bytes = segment->bytes};
        tms_status_t status = tms_save_choose(t, segment, copy, TMS_BACKUP_PINNED, &ranges, error);
        if (status == TMS_OK) status = tms_save_plan(t, segment, TMS_HOST_DEFAULT, copying, error);
        if (status != TMS_OK) return status;
        copy++;
    }
    return tms_backup_batch_start(&t->saver->stores, &t->planned.batch, &context, error);
}

static uint64_t count_guard_bytes(const unsigned char *bytes, uint64_t size) {
    uint64_t count = 0;
    for (uint64_t i = 0; i < size; i++) count += bytes[i] == TMS_GUARD_BYTE;
    return count;
}

static void count_all(sample_t *sample) {
    tms_transition_t *t = &sample->t;
    tms_backup_t *copy = sample->copies;
    TMS_FOR_EACH(segment, t) {
        uint64_t address;
        tms_live_t ranges = ranges_of(sample, segment, &address);
        tms_backup_commit(copy, &t->saver->stores);
        /* In the copy the ranges lie one after the other. */
        const unsigned char *bytes = ranges.range_count > 0
                                         ? tms_backup_find(copy, &t->saver->stores, ranges.ranges->begin - address, 1, NULL)
                                         : NULL;
        for (size_t i = 0; bytes && i < ranges.range_count; i++) {
            uint64_t size = ranges.ranges[i].end - ranges.ranges[i].begin;
            sample->counts[ranges.ranges - sample->ranges + (ptrdiff_t)i] = count_guard_bytes(bytes, size);
            bytes += size;
        }
        copy++;
    }
}

static void release_all(sample_t *sample) {
    tms_backup_t *copy = sample->copies;
    TMS_FOR_EACH(segment, &sample->t) tms_backup_destroy(copy++, &sample->t.saver->stores);
    free(sample->copies);
}

static tms_status_t copy_and_count(sample_t *sample, tms_error_t *error) {
    tms_transition_t *t = &sample->t;
    tms_device_mask_t copying = 0;
    size_t count = 0;
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    TMS_FOR_EACH(segment, t) count++;
    sample->copies = calloc(count + 1, sizeof *sample->copies);
    if (!sample->copies) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    tms_status_t status = plan_all(sample, &copying, error);
    if (status == TMS_OK) status = tms_crew_perform(t, copying, tms_save_copy, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the copies belong to the parent */
    tms_backup_batch_end(&t->saver->stores, &t->planned.batch);
    if (status == TMS_OK) count_all(sample);
    release_all(sample);
    return status;
}

static tms_status_t sample_all(tms_transition_t *t, tms_error_t *error) {
    tms_quiesced_t quiesced;
    tms_status_t status = tms_steps_quiesce(t, &quiesced, error);
    if (status == TMS_OK) status = copy_and_count((sample_t *)t, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the segments on the list belong to the parent */
    tms_completion_finish(t, false);
    return status;
}

tms_status_t tms_guard_bytes_count(tms_saver_t *saver, const tms_selection_t *selection, const tms_live_range_t *ranges,
                                   size_t range_count, uint64_t *counts, tms_error_t *error) {
    sample_t sample = {.t = {.saver = saver,
                             .requested = {.selection = selection,
                                           .operation = "check_fresh",
                                           .from = TMS_SEGMENT_ACTIVE,
                                           .through = TMS_SEGMENT_PAUSING,
                                           .to = TMS_SEGMENT_ACTIVE},
                             .act = sample_all},
                       .ranges = ranges,
                       .range_count = range_count,
                       .counts = counts};
    for (size_t i = 0; i < range_count; i++) counts[i] = TMS_NOT_RESIDENT;
    tms_status_t status = tms_steps_perform(&sample.t, error);
    tms_backup_stores_after_resume(&saver->stores);
    return status;
}
