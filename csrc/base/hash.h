/* FNV-1a, for tables and file names. Not safe against chosen collisions. */
#ifndef TMS_HASH_H
#define TMS_HASH_H

#include <stddef.h>
#include <stdint.h>

#define TMS_HASH_START 14695981039346656037u

static inline uint64_t tms_hash_number(uint64_t hash, uint64_t number) { return (hash ^ number) * 1099511628211u; }

static inline uint64_t tms_hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    const unsigned char *byte = (const unsigned char *)bytes;
    for (size_t i = 0; i < count; i++) hash = tms_hash_number(hash, byte[i]);
    return hash;
}

#endif
