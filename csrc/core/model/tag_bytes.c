#include "core/model/tag_bytes.h"

void tms_tag_bytes_add(tms_tag_bytes_t *sums, const tms_tag_t *tag, uint64_t bytes) {
    size_t i = 0;
    while (i < sums->named && sums->tag[i] != tag) i++;
    sums->total += bytes;
    if (i == TMS_MAX_TAGS_NAMED) {
        sums->others += bytes;
        return;
    }
    if (i == sums->named) sums->tag[sums->named++] = tag;
    sums->bytes[i] += bytes;
}

void tms_tag_bytes_append(const tms_tag_bytes_t *sums, tms_error_t *error) {
    for (size_t i = 0; i < sums->named; i++) {
        tms_error_append(error, "%s'%s' ", i ? ", " : "", sums->tag[i]->name);
        tms_error_append_bytes(error, sums->bytes[i]);
    }
    if (!sums->others) return;
    tms_error_append(error, ", others ");
    tms_error_append_bytes(error, sums->others);
}
