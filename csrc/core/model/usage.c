#include "core/model/usage.h"

static void add(tms_usage_t *usage, tms_segment_t *segment) {
    const uint64_t bytes = tms_segment_reserved(segment);
    tms_level_raise(&usage->mapped, bytes);
    tms_level_raise(&usage->by_device[segment->device], bytes);
    tms_level_raise(&segment->tag->mapped, bytes);
    segment->counted = true;
}

void tms_usage_remove(tms_usage_t *usage, tms_segment_t *segment) {
    const uint64_t bytes = tms_segment_reserved(segment);
    if (!segment->counted) return;
    tms_level_lower(&usage->mapped, bytes);
    tms_level_lower(&usage->by_device[segment->device], bytes);
    tms_level_lower(&segment->tag->mapped, bytes);
    segment->counted = false;
}

void tms_usage_update(tms_usage_t *usage, tms_segment_t *segment) {
    const bool mapped = tms_segment_is_mapped(segment);
    if (mapped && !segment->counted) add(usage, segment);
    if (!mapped) tms_usage_remove(usage, segment);
}

void tms_usage_reset_peaks(tms_usage_t *usage) {
    tms_level_reset_peak(&usage->mapped);
    for (int device = 0; device < TMS_MAX_DEVICES; device++) tms_level_reset_peak(&usage->by_device[device]);
}
