#include "core/model/segment.h"

uint64_t tms_segment_round(uint64_t bytes, size_t granularity) {
    uint64_t rest = bytes % granularity;
    if (rest == 0) return bytes;
    uint64_t missing = granularity - rest;
    return bytes > UINT64_MAX - missing ? 0 : bytes + missing;
}
