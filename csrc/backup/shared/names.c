#include "backup/shared/names.h"

#include <inttypes.h>
#include <stdio.h>

enum { WORD_BITS = 32, LENGTH_WORDS = 2 };

/* Adds the products of words with the coefficients. */
static uint64_t add_words(uint64_t sum, const uint64_t *coefficients, const uint32_t *words, size_t count) {
    for (size_t i = 0; i < count; i++) sum += coefficients[i] * words[i];
    return sum;
}

tms_shared_name_t tms_shared_name(const tms_shared_key_t *key, const tms_fingerprint_t *fingerprints, size_t count,
                                  uint64_t bytes) {
    const uint32_t length[LENGTH_WORDS] = {(uint32_t)bytes, (uint32_t)(bytes >> WORD_BITS)};
    uint32_t name[TMS_SHARED_NAME_WORDS];
    for (size_t i = 0; i < TMS_SHARED_NAME_WORDS; i++) {
        const uint64_t *coefficients = key->names[i];
        uint64_t sum = add_words(coefficients[0], coefficients + 1, length, LENGTH_WORDS);
        coefficients += 1 + LENGTH_WORDS;
        for (size_t chunk = 0; chunk < count; chunk++, coefficients += TMS_FINGERPRINT_WORDS)
            sum = add_words(sum, coefficients, fingerprints[chunk].words, TMS_FINGERPRINT_WORDS);
        name[i] = (uint32_t)(sum >> WORD_BITS);
    }
    tms_shared_name_t text;
    snprintf(text.text, sizeof(text.text), "%08" PRIx32 "%08" PRIx32 "%08" PRIx32 "%08" PRIx32, name[0], name[1], name[2],
             name[3]);
    return text;
}
