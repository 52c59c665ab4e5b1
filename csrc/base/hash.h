/* FNV-1a, for tables and file names, and a mixer for keys that are multiples of large powers of two, such as addresses. Not
 * safe against chosen collisions. */
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

/* Every bit of the result depends on every bit of the number (the finalizer of MurmurHash3). */
static inline uint64_t tms_hash_mix(uint64_t number) {
    enum { HALF = 33 };
    number = (number ^ (number >> HALF)) * 0xff51afd7ed558ccdu;
    number = (number ^ (number >> HALF)) * 0xc4ceb9fe1a85ec53u;
    return number ^ (number >> HALF);
}

#endif
