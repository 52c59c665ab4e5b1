#include "core/transition/expectation.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/segment.h"

static bool is_same_search(const tms_expectation_t *last, const tms_segment_t *first) {
    size_t count = 0;
    for (const tms_segment_t *segment = first; segment; segment = segment->next_in_transition) {
        if (segment->search != last->search) return false;
        count++;
    }
    return last->search > 0 && count == last->segments;
}

static bool is_same_answer(const tms_expectation_t *last, const tms_live_t *answer) {
    const tms_live_t *live = &last->live;
    if (!answer || !live->ranges) return false;
    if (answer->allocation_count != live->allocation_count || answer->range_count != live->range_count) return false;
    return (live->allocation_count == 0 ||
            memcmp(answer->allocations, live->allocations, live->allocation_count * sizeof *live->allocations) == 0) &&
           (live->range_count == 0 || memcmp(answer->ranges, live->ranges, live->range_count * sizeof *live->ranges) == 0);
}

static tms_status_t keep(tms_expectation_t *expectation, const tms_live_t *answer, const tms_error_context_t *context,
                         tms_error_t *error) {
    tms_expectation_release(expectation);
    if (!answer) return TMS_OK;
    const size_t ranges = answer->range_count * sizeof *answer->ranges;
    const size_t allocations = answer->allocation_count * sizeof *answer->allocations;
    char *block = malloc(ranges + allocations + 1);
    if (!block) return tms_error_set_os(error, context, "malloc", ENOMEM, NULL);
    if (ranges > 0) memcpy(block, answer->ranges, ranges);
    if (allocations > 0) memcpy(block + ranges, answer->allocations, allocations);
    expectation->live = (tms_live_t){.allocations = (const uint64_t *)(block + ranges),
                                     .allocation_count = answer->allocation_count,
                                     .ranges = (const tms_live_range_t *)block,
                                     .range_count = answer->range_count};
    return TMS_OK;
}

const tms_live_t *tms_expectation_find(const tms_expectation_t *expectation, const tms_segment_t *first) {
    bool exists = expectation->live.ranges && !expectation->varies && is_same_search(expectation, first);
    return exists ? &expectation->live : NULL;
}

tms_status_t tms_expectation_note(tms_expectation_t *expectation, tms_segment_t *first, const tms_live_t *answer, bool *same,
                                  const tms_error_context_t *context, tms_error_t *error) {
    const bool repeated = is_same_search(expectation, first);
    *same = repeated && is_same_answer(expectation, answer);
    expectation->varies = repeated && !*same;
    expectation->search++;
    expectation->segments = 0;
    for (tms_segment_t *segment = first; segment; segment = segment->next_in_transition) {
        segment->search = expectation->search;
        expectation->segments++;
    }
    return *same ? TMS_OK : keep(expectation, answer, context, error);
}

void tms_expectation_release(tms_expectation_t *expectation) {
    free((void *)expectation->live.ranges);
    expectation->live = (tms_live_t){0};
}
