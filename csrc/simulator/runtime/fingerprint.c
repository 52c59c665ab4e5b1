#include "include/tms_fingerprint.h"

#include <string.h>

#include "simulator/simulator.h"

static uint64_t finalized(uint64_t sum) {
    enum { FIRST = 30, SECOND = 27, THIRD = 31 };
    sum = (sum ^ (sum >> FIRST)) * TMS_FINGERPRINT_MIX_1;
    sum = (sum ^ (sum >> SECOND)) * TMS_FINGERPRINT_MIX_2;
    return sum ^ (sum >> THIRD);
}

void tms_sim_fingerprint(const void *key, const void *contents, uint64_t bytes, uint32_t words[4]) {
    enum { HALF = 32 };
    const tms_fingerprint_key_t *secret = key;
    uint64_t sums[TMS_FINGERPRINT_SUMS] = {0};
    for (uint64_t place = 0; place < bytes / TMS_FINGERPRINT_VECTOR_BYTES; place++) {
        uint32_t m[4];
        memcpy(m, (const char *)contents + place * TMS_FINGERPRINT_VECTOR_BYTES, sizeof m);
        for (uint64_t t = 0; t < TMS_FINGERPRINT_SUMS; t++) {
            const uint32_t *k = secret->vectors[place + t];
            sums[t] += (uint64_t)(m[0] + k[0]) * (m[1] + k[1]) + (uint64_t)(m[2] + k[2]) * (m[3] + k[3]);
        }
    }
    for (int i = 0; i < TMS_FINGERPRINT_WORDS; i++) {
        const uint64_t *mix = secret->mix[i];
        uint64_t sum = mix[(size_t)2 * TMS_FINGERPRINT_SUMS];
        for (size_t t = 0; t < TMS_FINGERPRINT_SUMS; t++) {
            const uint64_t total = finalized(sums[t]);
            sum += mix[2 * t] * (uint32_t)total + mix[2 * t + 1] * (total >> HALF);
        }
        words[i] = (uint32_t)(sum >> HALF);
    }
}
