/* Guards backup/shared/names.c: the function of the fingerprints and the length. */
#include "backup/shared/names.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static tms_shared_key_t *key;
static _Alignas(uint64_t) tms_fingerprint_t fingerprints[TMS_SHARED_OBJECT_CHUNKS];

/* Fills with the sequence of SplitMix64. */
static void fill(void *memory, size_t bytes, uint64_t seed) {
    uint64_t *word = memory;
    for (size_t i = 0; i < bytes / sizeof *word; i++) {
        uint64_t z = seed += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        word[i] = z ^ (z >> 31);
    }
}

static int make(void **state) {
    (void)state;
    key = calloc(1, sizeof *key);
    if (!key) return -1;
    fill(key->names, sizeof key->names, 1);
    fill(fingerprints, sizeof fingerprints, 2);
    return 0;
}

static int release(void **state) {
    (void)state;
    free(key);
    return 0;
}

/* Computes the name word by word, as the header defines it. */
static void assert_defined(size_t count, uint64_t bytes) {
    uint32_t words[TMS_SHARED_NAME_INPUT] = {(uint32_t)bytes, (uint32_t)(bytes >> 32)};
    char expected[TMS_SHARED_NAME_DIGITS + 1] = "";
    memcpy(words + 2, fingerprints, count * sizeof *fingerprints);
    for (size_t i = 0; i < TMS_SHARED_NAME_WORDS; i++) {
        uint64_t sum = key->names[i][0];
        for (size_t j = 0; j < 2 + 4 * count; j++) sum += key->names[i][j + 1] * words[j];
        snprintf(expected + 8 * i, 9, "%08" PRIx32, (uint32_t)(sum >> 32));
    }
    const tms_shared_name_t name = tms_shared_name(key, fingerprints, count, bytes);
    assert_string_equal(name.text, expected);
}

static void it_is_the_multilinear_function(void **state) {
    (void)state;
    assert_int_equal(TMS_SHARED_NAME_INPUT, 514);
    assert_defined(1, TMS_MIN_OBJECT_BYTES);
    assert_defined(2, TMS_FINGERPRINT_CHUNK_BYTES + 16);
    assert_defined(TMS_SHARED_OBJECT_CHUNKS, TMS_MAX_OBJECT_BYTES);
    assert_defined(1, (UINT64_C(1) << 40) + 5); /* both words of the length count */
}

static void the_key_is_a_part_of_each_word(void **state) {
    (void)state;
    const tms_shared_name_t before = tms_shared_name(key, fingerprints, 3, 1000000);
    for (size_t i = 0; i < TMS_SHARED_NAME_WORDS; i++) {
        key->names[i][0] += UINT64_C(1) << 32;
        const tms_shared_name_t after = tms_shared_name(key, fingerprints, 3, 1000000);
        key->names[i][0] -= UINT64_C(1) << 32;
        for (size_t j = 0; j < TMS_SHARED_NAME_WORDS; j++)
            assert_int_equal(strncmp(before.text + 8 * j, after.text + 8 * j, 8) != 0, i == j);
    }
}

static void every_word_of_the_contents_counts(void **state) {
    (void)state;
    const tms_shared_name_t before = tms_shared_name(key, fingerprints, TMS_SHARED_OBJECT_CHUNKS, TMS_MAX_OBJECT_BYTES);
    for (size_t i = 0; i < TMS_SHARED_OBJECT_CHUNKS; i++) {
        for (size_t word = 0; word < TMS_FINGERPRINT_WORDS; word++) {
            fingerprints[i].words[word] ^= 1;
            tms_shared_name_t after = tms_shared_name(key, fingerprints, TMS_SHARED_OBJECT_CHUNKS, TMS_MAX_OBJECT_BYTES);
            fingerprints[i].words[word] ^= 1;
            assert_string_not_equal(before.text, after.text);
        }
    }
}

static void a_list_that_ends_with_zeros_has_another_name(void **state) {
    (void)state;
    memset(&fingerprints[1], 0, sizeof fingerprints[1]);
    const tms_shared_name_t one = tms_shared_name(key, fingerprints, 1, TMS_FINGERPRINT_CHUNK_BYTES);
    const tms_shared_name_t two = tms_shared_name(key, fingerprints, 2, 2 * TMS_FINGERPRINT_CHUNK_BYTES);
    assert_string_not_equal(one.text, two.text);
}

int main(void) {
#define NAME_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        NAME_TEST(it_is_the_multilinear_function),
        NAME_TEST(the_key_is_a_part_of_each_word),
        NAME_TEST(every_word_of_the_contents_counts),
        NAME_TEST(a_list_that_ends_with_zeros_has_another_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
