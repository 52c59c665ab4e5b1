/* Guards the fingerprint of a chunk (csrc/include/tms_fingerprint.h) in C: it mixes well, depends on the place of each bit
 * and on the key, and its words collide as often as chance has it. tests/kernels compares the kernel with it on a real GPU.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "include/tms_fingerprint.h"
#include "simulated_cuda.h"

enum { SEED = 20261127, WORD_BITS = 32, BITS = TMS_FINGERPRINT_WORDS * WORD_BITS, SMALL = 512 };

static tms_fingerprint_key_t key;
static uint64_t random_state;

/* Returns the next number of SplitMix64 (Steele, Lea and Flood, 2014). */
static uint64_t next_random(void) {
    uint64_t z = random_state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static void fill_random(void *contents, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t number = next_random();
        memcpy((char *)contents + at, &number, sizeof number);
    }
}

static void new_key(uint64_t seed) {
    _Static_assert(sizeof key % sizeof(uint64_t) == 0, "fill_random writes whole numbers");
    random_state = seed;
    fill_random(&key, sizeof key);
}

static tms_fingerprint_t fingerprint(const void *contents, size_t bytes) {
    tms_fingerprint_t result;
    simulated()->fingerprint(&key, contents, bytes, result.words);
    return result;
}

static bool equal(tms_fingerprint_t a, tms_fingerprint_t b) { return memcmp(&a, &b, sizeof a) == 0; }

static void a_flipped_bit_changes_each_bit_of_the_result_in_half_of_the_cases(void **state) {
    (void)state;
    enum { TRIALS = 100000, KINDS = 3, PER_KEY = 100 };
    for (int kind = 0; kind < KINDS; kind++) {
        static uint8_t contents[SMALL];
        uint32_t flips[BITS] = {0};
        random_state = SEED + (uint64_t)kind;
        for (int trial = 0; trial < TRIALS; trial++) {
            if (trial % PER_KEY == 0) fill_random(&key, sizeof key);
            if (kind == 0) memset(contents, 0, sizeof contents);
            if (kind == 1) memset(contents, (int)(next_random() & 0xFF), sizeof contents);
            if (kind == 2) fill_random(contents, sizeof contents);
            const uint64_t bit = next_random() % (8 * sizeof contents);
            const tms_fingerprint_t before = fingerprint(contents, sizeof contents);
            contents[bit / 8] ^= (uint8_t)(1 << bit % 8);
            const tms_fingerprint_t after = fingerprint(contents, sizeof contents);
            for (int i = 0; i < BITS; i++) {
                flips[i] += (before.words[i / WORD_BITS] ^ after.words[i / WORD_BITS]) >> i % WORD_BITS & 1;
            }
        }
        for (int i = 0; i < BITS; i++) {
            const double share = (double)flips[i] / TRIALS;
            if (share < 0.49 || share > 0.51) fail_msg("bit %d of kind %d flips in %.4f of the cases", i, kind, share);
        }
    }
}

static void the_place_of_contents_matters(void **state) {
    (void)state;
    enum { BYTES = 64 * 1024, VECTOR = TMS_FINGERPRINT_VECTOR_BYTES, WORDS = BYTES / 4 };
    static uint8_t contents[BYTES + VECTOR];
    static uint32_t swapped[WORDS];
    new_key(SEED);
    fill_random(contents, sizeof contents);
    const tms_fingerprint_t whole = fingerprint(contents, BYTES);
    for (int shift = 1; shift <= VECTOR; shift++) assert_false(equal(whole, fingerprint(contents + shift, BYTES)));
    for (int trial = 0; trial < 1000; trial++) {
        const uint64_t a = next_random() % WORDS, b = trial % 2 ? (a ^ 1) : next_random() % WORDS;
        memcpy(swapped, contents, BYTES);
        const uint32_t kept = swapped[a];
        swapped[a] = swapped[b];
        swapped[b] = kept;
        assert_int_equal(equal(whole, fingerprint(swapped, BYTES)), swapped[a] == swapped[b]);
    }
}

static int compare_fingerprints(const void *a, const void *b) { return memcmp(a, b, sizeof(tms_fingerprint_t)); }

static void constant_pages_differ(void **state) {
    (void)state;
    enum { BYTES = 64 * 1024, VALUES = 256 };
    static uint8_t page[BYTES];
    static tms_fingerprint_t found[VALUES];
    new_key(SEED);
    for (int value = 0; value < VALUES; value++) {
        memset(page, value, sizeof page);
        found[value] = fingerprint(page, sizeof page);
    }
    qsort(found, VALUES, sizeof *found, compare_fingerprints);
    for (int i = 1; i < VALUES; i++) assert_false(equal(found[i - 1], found[i]));
}

static void the_smallest_change_of_a_weight_is_seen(void **state) {
    (void)state;
    enum { WEIGHTS = 8 * 1024 };
    static uint16_t weights[WEIGHTS]; /* bfloat16: the upper half of a float */
    new_key(SEED);
    for (int i = 0; i < WEIGHTS; i++) { /* a normal distribution, as of the initial weights of a layer */
        const double u = ((double)(next_random() >> 11) + 1) / 9007199254740993.0,
                     v = (double)(next_random() >> 11) / 9007199254740992.0;
        const float weight = (float)(0.02 * sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
        uint32_t bits;
        memcpy(&bits, &weight, sizeof bits);
        weights[i] = (uint16_t)(bits >> 16);
    }
    const tms_fingerprint_t before = fingerprint(weights, sizeof weights);
    for (int i = 0; i < WEIGHTS; i++) {
        weights[i] ^= 1;
        assert_false(equal(before, fingerprint(weights, sizeof weights)));
        weights[i] ^= 1;
        weights[i] ^= 0x8000; /* the sign */
        assert_false(equal(before, fingerprint(weights, sizeof weights)));
        weights[i] ^= 0x8000;
    }
    for (int i = 0; i < WEIGHTS; i++) weights[i] ^= 0x8000;
    assert_false(equal(before, fingerprint(weights, sizeof weights)));
}

static int compare_words(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void words_collide_as_often_as_chance_has_it(void **state) {
    (void)state;
    enum { CHUNKS = 1 << 21 };
    uint32_t *words[TMS_FINGERPRINT_WORDS];
    new_key(SEED);
    for (int i = 0; i < TMS_FINGERPRINT_WORDS; i++) assert_non_null(words[i] = malloc(CHUNKS * sizeof(uint32_t)));
    for (uint32_t chunk = 0; chunk < CHUNKS; chunk++) {
        const uint32_t contents[8] = {chunk, 0, 0, 0, 0, 0, 0, chunk};
        const tms_fingerprint_t found = fingerprint(contents, sizeof contents);
        for (int i = 0; i < TMS_FINGERPRINT_WORDS; i++) words[i][chunk] = found.words[i];
    }
    const double expected = (double)CHUNKS * (CHUNKS - 1) / 2 / 4294967296.0;
    for (int i = 0; i < TMS_FINGERPRINT_WORDS; i++) {
        uint64_t collisions = 0, same = 0;
        qsort(words[i], CHUNKS, sizeof(uint32_t), compare_words);
        for (uint32_t chunk = 1; chunk < CHUNKS; chunk++) {
            same = words[i][chunk] == words[i][chunk - 1] ? same + 1 : 0; /* pairs with the chunks before */
            collisions += same;
        }
        if (fabs((double)collisions - expected) > 3 * sqrt(expected)) {
            fail_msg("word %d collides %llu times, by chance %.0f", i, (unsigned long long)collisions, expected);
        }
        free(words[i]);
    }
}

static void another_key_gives_other_fingerprints(void **state) {
    (void)state;
    uint8_t contents[SMALL] = {0};
    new_key(SEED);
    const tms_fingerprint_t first = fingerprint(contents, sizeof contents);
    assert_true(equal(first, fingerprint(contents, sizeof contents)));
    new_key(SEED + 1);
    assert_false(equal(first, fingerprint(contents, sizeof contents)));
}

static void the_longest_chunk_uses_all_of_the_key(void **state) {
    (void)state;
    uint8_t *contents = calloc(1, TMS_FINGERPRINT_CHUNK_BYTES);
    assert_non_null(contents);
    new_key(SEED);
    const tms_fingerprint_t before = fingerprint(contents, TMS_FINGERPRINT_CHUNK_BYTES);
    contents[TMS_FINGERPRINT_CHUNK_BYTES - 1] = 1;
    assert_false(equal(before, fingerprint(contents, TMS_FINGERPRINT_CHUNK_BYTES)));
    contents[TMS_FINGERPRINT_CHUNK_BYTES - 1] = 0;
    key.vectors[TMS_FINGERPRINT_VECTORS + TMS_FINGERPRINT_SUMS - 2][0]++;
    contents[TMS_FINGERPRINT_CHUNK_BYTES - 1] = 0;
    assert_false(equal(before, fingerprint(contents, TMS_FINGERPRINT_CHUNK_BYTES)));
    free(contents);
}

/* On a GPU, neighbouring blocks of pinned memory can be accessed as one. */
static void the_kernels_buffer_may_consist_of_several_pinned_blocks(void **state) {
    enum { PAGE = 4096, CHUNKS = 2, BEFORE = sizeof(tms_fingerprint_chunk_t) };
    (void)state;
    CUmodule module = NULL;
    CUfunction function = NULL;
    CUdeviceptr contents = 0, secret = 0;
    uint32_t count = CHUNKS;
    char *pages = mmap(NULL, (size_t)2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(pages, MAP_FAILED);
    for (int i = 0; i < 2; i++) ASSERT_CUDA(CALL(cuMemHostRegister_v2, pages + (size_t)i * PAGE, PAGE, 0));
    ASSERT_CUDA(CALL(cuModuleLoadData, &module, ".entry tms_fingerprint("));
    ASSERT_CUDA(CALL(cuModuleGetFunction, &function, module, "tms_fingerprint"));
    ASSERT_CUDA(CALL(cuModuleGetGlobal_v2, &secret, NULL, module, "tms_fingerprint_key"));
    ASSERT_CUDA(CALL(cuMemAlloc_v2, &contents, (size_t)CHUNKS * SMALL));
    new_key(SEED);
    fill_random((void *)(uintptr_t)contents, (size_t)CHUNKS * SMALL);
    memcpy((void *)(uintptr_t)secret, &key, sizeof key);
    tms_fingerprint_chunk_t *chunks = (tms_fingerprint_chunk_t *)(void *)(pages + PAGE - BEFORE);
    for (uint64_t i = 0; i < CHUNKS; i++) chunks[i] = (tms_fingerprint_chunk_t){contents + i * SMALL, SMALL};
    CUdeviceptr from = (uintptr_t)chunks, to = (uintptr_t)(chunks + CHUNKS);
    void *parameters[] = {&from, &count, &to};
    ASSERT_CUDA(CALL(cuLaunchKernel, function, 1, 1, 1, TMS_FINGERPRINT_THREADS, 1, 1, 0, NULL, parameters, NULL));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    for (uint64_t i = 0; i < CHUNKS; i++) {
        const tms_fingerprint_t expected = fingerprint((const void *)(uintptr_t)chunks[i].address, SMALL);
        assert_memory_equal((const tms_fingerprint_t *)(const void *)(chunks + CHUNKS) + i, &expected, sizeof expected);
    }
    /* The second block is not pinned any more. */
    ASSERT_CUDA(CALL(cuMemHostUnregister, pages + PAGE));
    ASSERT_CUDA(CALL(cuLaunchKernel, function, 1, 1, 1, TMS_FINGERPRINT_THREADS, 1, 1, 0, NULL, parameters, NULL));
    assert_int_equal(CALL(cuCtxSynchronize), CUDA_ERROR_ILLEGAL_ADDRESS);
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    assert_int_equal(munmap(pages, (size_t)2 * PAGE), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_flipped_bit_changes_each_bit_of_the_result_in_half_of_the_cases),
        cmocka_unit_test(the_place_of_contents_matters),
        cmocka_unit_test(constant_pages_differ),
        cmocka_unit_test(the_smallest_change_of_a_weight_is_seen),
        cmocka_unit_test(words_collide_as_often_as_chance_has_it),
        cmocka_unit_test(another_key_gives_other_fingerprints),
        cmocka_unit_test(the_longest_chunk_uses_all_of_the_key),
        cmocka_unit_test_setup_teardown(the_kernels_buffer_may_consist_of_several_pinned_blocks, setup_one_gpu,
                                        teardown_gpus),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
