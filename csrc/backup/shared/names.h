/* The names of objects: 128 bits that are computed from the fingerprints of the contents and from their length.
 *
 * An object has at most TMS_MAX_OBJECT_BYTES bytes, so at most TMS_SHARED_OBJECT_CHUNKS fingerprints
 * (include/tms_fingerprint.h). The length in bytes has the words w[0] (the lower half) and w[1], and the words of the
 * fingerprints follow. They are reduced by the multilinear function of Lemire and Kaser (2014) with random 64-bit numbers c,
 * four times:
 *
 *   N[i] = upper half of (c[i][0] + sum over j of c[i][j + 1] * w[j])              mod 2^64
 *
 * A shorter list is a longer one that ends with zeros. It has another length, so it differs in w[0] or w[1]. Two different
 * lists have one name with a probability of at most 2^-128. Together with the fingerprints, two different
 * contents have one name with a probability below 2^-120.
 *
 * A pure function; any thread. */
#ifndef TMS_SHARED_NAMES_H
#define TMS_SHARED_NAMES_H

#include <stddef.h>
#include <stdint.h>

#include "backup/content.h"
#include "include/tms_fingerprint.h"

enum {
    TMS_SHARED_OBJECT_CHUNKS = TMS_MAX_OBJECT_BYTES / TMS_FINGERPRINT_CHUNK_BYTES,
    TMS_SHARED_NAME_WORDS = 4,                                                    /* of 32 bits */
    TMS_SHARED_NAME_INPUT = TMS_SHARED_OBJECT_CHUNKS * TMS_FINGERPRINT_WORDS + 2, /* the fingerprints and the length */
    TMS_SHARED_NAME_DIGITS = 8 * TMS_SHARED_NAME_WORDS
};

/* The secret of a folder. */
typedef struct tms_shared_key {
    tms_fingerprint_key_t fingerprints;
    uint64_t names[TMS_SHARED_NAME_WORDS][TMS_SHARED_NAME_INPUT + 1];
} tms_shared_key_t;

/* Hexadecimal digits, which are the name of the file. */
typedef struct tms_shared_name {
    char text[TMS_SHARED_NAME_DIGITS + 1];
} tms_shared_name_t;

/* Names `bytes` bytes of contents that have these fingerprints, of which there are at most TMS_SHARED_OBJECT_CHUNKS. */
tms_shared_name_t tms_shared_name(const tms_shared_key_t *key, const tms_fingerprint_t *fingerprints, size_t count,
                                  uint64_t bytes);

#endif
