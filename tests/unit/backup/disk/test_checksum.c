/* Guards checksum.c: the published vectors of CRC-32C, and both implementations against the definition, bit by bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backup/disk/checksum.h"

static tms_checksum_t *const IMPLEMENTATIONS[] = {tms_checksum_by_table, tms_checksum_by_instruction};

/* Both, or only the table if this CPU has no CRC instruction. */
static size_t implementations(void) { return tms_checksum_has_instruction() ? 2 : 1; }

static void assert_checksum(const void *data, size_t bytes, uint32_t expected) {
    for (size_t i = 0; i < implementations(); i++) assert_int_equal(IMPLEMENTATIONS[i](data, bytes), expected);
}

/* The definition: polynomial division, one bit at a time, with reflected bits and inverted initial and final values. */
static uint32_t by_definition(const unsigned char *data, size_t bytes) {
    uint32_t remainder = 0xFFFFFFFF;
    for (size_t i = 0; i < bytes; i++) {
        remainder ^= data[i];
        for (int bit = 0; bit < 8; bit++) remainder = remainder >> 1 ^ (remainder & 1 ? 0x82F63B78 : 0);
    }
    return ~remainder;
}

static void published_vectors(void **state) {
    (void)state;
    unsigned char data[48];
    assert_ptr_equal(tms_checksum_choose(), IMPLEMENTATIONS[implementations() - 1]);
    assert_checksum("", 0, 0);
    assert_checksum("123456789", 9, 0xE3069283);
    /* RFC 3720, B.4, which writes checksums with the lowest byte first. */
    memset(data, 0, 32);
    assert_checksum(data, 32, 0x8A9136AA);
    memset(data, 0xFF, 32);
    assert_checksum(data, 32, 0x62A8AB43);
    for (int i = 0; i < 32; i++) data[i] = (unsigned char)i;
    assert_checksum(data, 32, 0x46DD794E);
    for (int i = 0; i < 32; i++) data[i] = (unsigned char)(31 - i);
    assert_checksum(data, 32, 0x113FDB5C);
    static const unsigned char read_command[48] = {0x01,        0xC0,        [16] = 0x14, [22] = 0x04,
                                                   [27] = 0x14, [31] = 0x18, 0x28,        [40] = 0x02};
    assert_checksum(read_command, 48, 0xD9963A56);
}

enum { MAX_BYTES = 100 << 10, ROUNDS = 400, ALIGNMENTS = 16 };

static uint64_t next_random(uint64_t *seed) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

static void every_length_and_alignment_as_defined(void **state) {
    (void)state;
    uint64_t seed = 5;
    unsigned char *data = malloc(MAX_BYTES + ALIGNMENTS);
    assert_non_null(data);
    for (size_t i = 0; i < MAX_BYTES + ALIGNMENTS; i++) data[i] = (unsigned char)next_random(&seed);
    for (size_t bytes = 0; bytes < 70; bytes++) {
        for (size_t start = 0; start < ALIGNMENTS; start++)
            assert_checksum(data + start, bytes, by_definition(data + start, bytes));
    }
    for (int round = 0; round < ROUNDS; round++) {
        size_t start = next_random(&seed) % ALIGNMENTS, bytes = next_random(&seed) % MAX_BYTES;
        assert_checksum(data + start, bytes, by_definition(data + start, bytes));
    }
    free(data);
}

static void one_bit_anywhere_is_seen(void **state) {
    (void)state;
    unsigned char *data = calloc(1, MAX_BYTES);
    assert_non_null(data);
    uint32_t before = tms_checksum_choose()(data, MAX_BYTES);
    for (size_t i = 0; i < MAX_BYTES; i += 997) {
        for (int bit = 0; bit < 8; bit++) {
            data[i] ^= (unsigned char)(1 << bit);
            if (tms_checksum_choose()(data, MAX_BYTES) == before) fail_msg("bit %d of byte %zu does not count", bit, i);
            data[i] ^= (unsigned char)(1 << bit);
        }
    }
    assert_checksum(data, MAX_BYTES, before);
    free(data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_vectors),
        cmocka_unit_test(every_length_and_alignment_as_defined),
        cmocka_unit_test(one_bit_anywhere_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
