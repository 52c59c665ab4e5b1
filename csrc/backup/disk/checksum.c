#include "backup/disk/checksum.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read with their first byte lowest");

/* Bits are reflected: the most significant bit of a remainder is the coefficient of x^0. The state of a computation is the
 * inverse of the checksum of the bytes so far, so it begins as all ones. */
enum { WORD_BYTES = sizeof(uint64_t), SLICES = WORD_BYTES, BYTE_VALUES = 256, BYTE_BITS = 8 };
#define POLYNOMIAL UINT32_C(0x82F63B78)
#define X_TO_0     UINT32_C(0x80000000)
#define X_TO_8     (X_TO_0 >> 8)

/* ---- tables ---- */

/* ENTRY: the remainder of `byte` followed by as many zero bytes as the number of its slice. It is linear, so it is the sum
 * of the remainders of its bits. Each of the 64 one-bit remainders is the previous one multiplied by x. */
#define BIT(byte, bit, remainder) ((byte) >> (bit) & 1 ? (remainder) : 0)
#define ENTRY(byte, r7, r6, r5, r4, r3, r2, r1, r0)                                                                         \
    (BIT(byte, 7, r7) ^ BIT(byte, 6, r6) ^ BIT(byte, 5, r5) ^ BIT(byte, 4, r4) ^ BIT(byte, 3, r3) ^ BIT(byte, 2, r2) ^      \
     BIT(byte, 1, r1) ^ BIT(byte, 0, r0))
#define ROW4(b, ...)                                                                                                        \
    ENTRY((b), __VA_ARGS__), ENTRY((b) + 1, __VA_ARGS__), ENTRY((b) + 2, __VA_ARGS__), ENTRY((b) + 3, __VA_ARGS__)
#define ROW16(b, ...)                                                                                                       \
    ROW4(b, __VA_ARGS__), ROW4((b) + 4, __VA_ARGS__), ROW4((b) + 8, __VA_ARGS__), ROW4((b) + 12, __VA_ARGS__)
#define ROW64(b, ...)                                                                                                       \
    ROW16(b, __VA_ARGS__), ROW16((b) + 16, __VA_ARGS__), ROW16((b) + 32, __VA_ARGS__), ROW16((b) + 48, __VA_ARGS__)
#define SLICE(...) ROW64(0, __VA_ARGS__), ROW64(64, __VA_ARGS__), ROW64(128, __VA_ARGS__), ROW64(192, __VA_ARGS__)

static const uint32_t TABLE[SLICES][BYTE_VALUES] = {
    {SLICE(0x82F63B78, 0x417B1DBC, 0x20BD8EDE, 0x105EC76F, 0x8AD958CF, 0xC79A971F, 0xE13B70F7, 0xF26B8303)},
    {SLICE(0xFBC3FAF9, 0xFF17C604, 0x7F8BE302, 0x3FC5F181, 0x9D14C3B8, 0x4E8A61DC, 0x274530EE, 0x13A29877)},
    {SLICE(0x8B277743, 0xC76580D9, 0xE144FB14, 0x70A27D8A, 0x38513EC5, 0x9EDEA41A, 0x4F6F520D, 0xA541927E)},
    {SLICE(0x52A0C93F, 0xABA65FE7, 0xD725148B, 0xE964B13D, 0xF64463E6, 0x7B2231F3, 0xBF672381, 0xDD45AAB8)},
    {SLICE(0x6EA2D55C, 0x37516AAE, 0x1BA8B557, 0x8F2261D3, 0xC5670B91, 0xE045BEB0, 0x7022DF58, 0x38116FAC)},
    {SLICE(0x1C08B7D6, 0x0E045BEB, 0x85F4168D, 0xC00C303E, 0x6006181F, 0xB2F53777, 0xDB8CA0C3, 0xEF306B19)},
    {SLICE(0xF56E0EF4, 0x7AB7077A, 0x3D5B83BD, 0x9C5BFAA6, 0x4E2DFD53, 0xA5E0C5D1, 0xD0065990, 0x68032CC8)},
    {SLICE(0x34019664, 0x1A00CB32, 0x0D006599, 0x847609B4, 0x423B04DA, 0x211D826D, 0x9278FA4E, 0x493C7D27)},
};

static uint32_t step_byte(uint32_t state, unsigned char byte) {
    return state >> BYTE_BITS ^ TABLE[0][(state ^ byte) & 0xFF];
}

uint32_t tms_checksum_by_table(const void *data, size_t bytes) {
    const unsigned char *cursor = data;
    uint32_t state = UINT32_MAX;
    for (; bytes >= WORD_BYTES; bytes -= WORD_BYTES, cursor += WORD_BYTES) {
        uint64_t word;
        memcpy(&word, cursor, sizeof(word));
        word ^= state;
        state = 0;
        for (int i = 0; i < WORD_BYTES; i++) state ^= TABLE[SLICES - 1 - i][word >> (BYTE_BITS * i) & 0xFF];
    }
    while (bytes-- > 0) state = step_byte(state, *cursor++);
    return ~state;
}

/* ---- the instruction ---- */

#if defined(__x86_64__)

#define WITH_INSTRUCTION __attribute__((target("sse4.2")))

/* Queries the CPU directly: the compiler's builtin would add a constructor to every process that loads the library. */
bool tms_checksum_has_instruction(void) {
    unsigned a = 0, b = 0, features = 0, d = 0;
    return __get_cpuid(1, &a, &b, &features, &d) && (features & bit_SSE4_2);
}

WITH_INSTRUCTION static inline uint32_t step_word(uint32_t state, uint64_t word) {
    return (uint32_t)__builtin_ia32_crc32di(state, word);
}

#elif defined(__aarch64__)

#define WITH_INSTRUCTION

bool tms_checksum_has_instruction(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

static inline uint32_t step_word(uint32_t state, uint64_t word) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
    return state;
}

#endif

#if defined(WITH_INSTRUCTION)

/* Below this size, combining three streams costs more than they save. */
enum { STREAMS = 3, STREAMED_LEAST_BYTES = 16 << 10 };

/* The product of two remainders. */
static uint32_t multiply(uint32_t one, uint32_t other) {
    uint32_t product = 0;
    for (; one; one <<= 1) {
        if (one & X_TO_0) product ^= other;
        other = other >> 1 ^ (other & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

/* The factor by which `bytes` zero bytes multiply a state. */
static uint32_t shift_over(size_t bytes) {
    uint32_t shift = X_TO_0;
    for (uint32_t square = X_TO_8; bytes; bytes >>= 1, square = multiply(square, square)) {
        if (bytes & 1) shift = multiply(shift, square);
    }
    return shift;
}

WITH_INSTRUCTION static inline uint32_t step_at(uint32_t state, const unsigned char *data) {
    uint64_t word;
    memcpy(&word, data, sizeof(word));
    return step_word(state, word);
}

/* An instruction takes three cycles and a new one can begin in each, so three independent streams run as fast as one. */
WITH_INSTRUCTION static uint32_t step_streams(uint32_t state, const unsigned char *data, size_t bytes) {
    uint32_t first = state, second = 0, third = 0;
    for (const unsigned char *end = data + bytes; data < end; data += WORD_BYTES) {
        first = step_at(first, data);
        second = step_at(second, data + bytes);
        third = step_at(third, data + 2 * bytes);
    }
    uint32_t shift = shift_over(bytes);
    return multiply(multiply(first, shift) ^ second, shift) ^ third;
}

WITH_INSTRUCTION uint32_t tms_checksum_by_instruction(const void *data, size_t bytes) {
    const unsigned char *cursor = data;
    uint32_t state = UINT32_MAX;
    if (bytes >= STREAMED_LEAST_BYTES) {
        size_t stream = bytes / STREAMS / WORD_BYTES * WORD_BYTES;
        state = step_streams(state, cursor, stream);
        cursor += STREAMS * stream;
        bytes -= STREAMS * stream;
    }
    for (; bytes >= WORD_BYTES; bytes -= WORD_BYTES, cursor += WORD_BYTES) state = step_at(state, cursor);
    while (bytes-- > 0) state = step_byte(state, *cursor++);
    return ~state;
}

#else

bool tms_checksum_has_instruction(void) { return false; }
uint32_t tms_checksum_by_instruction(const void *data, size_t bytes) { return tms_checksum_by_table(data, bytes); }

#endif

tms_checksum_t *tms_checksum_choose(void) {
    return tms_checksum_has_instruction() ? tms_checksum_by_instruction : tms_checksum_by_table;
}
