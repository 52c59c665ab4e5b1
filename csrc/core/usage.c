#include "core/usage.h"

void tms_usage_map(tms_usage_t *usage, const tms_segment_t *segment) {
    const uint64_t bytes = tms_segment_reserved(segment);
    tms_level_raise(&usage->mapped, bytes);
    tms_level_raise(&usage->by_device[segment->device], bytes);
    tms_level_raise(&segment->tag->mapped, bytes);
}

void tms_usage_unmap(tms_usage_t *usage, const tms_segment_t *segment) {
    const uint64_t bytes = tms_segment_reserved(segment);
    tms_level_lower(&usage->mapped, bytes);
    tms_level_lower(&usage->by_device[segment->device], bytes);
    tms_level_lower(&segment->tag->mapped, bytes);
}

void tms_usage_reset_peaks(tms_usage_t *usage) {
    tms_level_reset_peak(&usage->mapped);
    for (int device = 0; device < TMS_MAX_DEVICES; device++) tms_level_reset_peak(&usage->by_device[device]);
}
