/* Bytes by tag, for messages and the log, which name a few tags and sum up the rest. Plain data owned by its user; no lock,
 * nothing to release. */
#ifndef TMS_TAG_BYTES_H
#define TMS_TAG_BYTES_H

#include "core/model/region.h"

enum { TMS_MAX_TAGS_NAMED = TMS_REPORT_TAGS };

typedef struct tms_tag_bytes {
    const tms_tag_t *tag[TMS_MAX_TAGS_NAMED]; /* the first ones */
    uint64_t bytes[TMS_MAX_TAGS_NAMED];
    size_t named;
    uint64_t others; /* bytes of all other tags */
    uint64_t total;
} tms_tag_bytes_t;

void tms_tag_bytes_add(tms_tag_bytes_t *sums, const tms_tag_t *tag, uint64_t bytes);
/* Adds "'weights' 2097152 bytes (2.0 MiB), others 4194304 bytes (4.0 MiB)" to a message. */
void tms_tag_bytes_append(const tms_tag_bytes_t *sums, tms_error_t *error);

#endif
