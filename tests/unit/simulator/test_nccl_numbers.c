/* Guards the simulated GPU's NCCL: every type and every reduction, on two and three ranks. */
#include <math.h>

#include "nccl_fixture.h"

static const size_t bytes_of[SIM_NCCL_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/* One element of each rank, reduced; the bits of the result are the same on all. */
static uint64_t reduce(int type, int reduction, int count, const uint64_t *elements) {
    rank_t ranks[RANKS];
    uint64_t bits = 0;
    make_ranks(ranks, count, sizeof bits);
    for (int i = 0; i < count; i++) memcpy(ranks[i].source, &elements[i], sizeof bits);
    for (int i = 0; i < count; i++)
        ASSERT_NCCL(
            CALL(ncclAllReduce, ranks[i].source, ranks[i].destination, 1, type, reduction, ranks[i].comm, ranks[i].stream));
    synchronize(ranks, count);
    memcpy(&bits, ranks[0].destination, bytes_of[type]);
    for (int i = 1; i < count; i++) assert_memory_equal(ranks[i].destination, ranks[0].destination, sizeof bits);
    drop_ranks(ranks, count);
    return bits;
}

static void assert_reduced(int line, int type, int reduction, uint64_t a, uint64_t b, uint64_t expected) {
    const uint64_t elements[] = {a, b};
    uint64_t bits = reduce(type, reduction, 2, elements);
    if (bits != expected)
        fail_msg("line %d: type %d, reduction %d: %#llx and not %#llx", line, type, reduction, (unsigned long long)bits,
                 (unsigned long long)expected);
}
#define ASSERT_REDUCED(type, reduction, a, b, expected) assert_reduced(__LINE__, type, reduction, a, b, expected)

/* Sum, product, maximum, minimum, average of two elements. */
static void assert_all(int line, int type, uint64_t a, uint64_t b, const uint64_t *expected) {
    for (int reduction = 0; reduction < SIM_NCCL_REDUCTIONS; reduction++)
        assert_reduced(line, type, reduction, a, b, expected[reduction]);
}
#define ASSERT_ALL(type, a, b, ...) assert_all(__LINE__, type, a, b, (const uint64_t[]){__VA_ARGS__})

static uint64_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static uint64_t bits_of_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void whole_numbers(void **state) {
    (void)state;
    ASSERT_ALL(SIM_NCCL_INT8, 0xfd, 7, 4, (uint8_t)-21, 7, 0xfd, 2);
    ASSERT_ALL(SIM_NCCL_UINT8, 0xfd, 7, 4, (uint8_t)(253 * 7), 0xfd, 7, 2); /* the sum wraps around, and then is divided */
    ASSERT_ALL(SIM_NCCL_INT32, (uint32_t)-9, 4, (uint32_t)-5, (uint32_t)-36, 4, (uint32_t)-9, (uint32_t)-2);
    ASSERT_ALL(SIM_NCCL_UINT32, 0xffffffff, 3, 2, 0xfffffffd, 0xffffffff, 3, 1);
    ASSERT_ALL(SIM_NCCL_INT64, (uint64_t)-9, 4, (uint64_t)-5, (uint64_t)-36, 4, (uint64_t)-9, (uint64_t)-2);
    ASSERT_ALL(SIM_NCCL_UINT64, (uint64_t)-9, 4, (uint64_t)-5, (uint64_t)-36, (uint64_t)-9, 4, ((uint64_t)-5) / 2);
}

static void floating_point_numbers(void **state) {
    (void)state;
    ASSERT_ALL(SIM_NCCL_FLOAT, bits_of_float(1.5F), bits_of_float(-4), bits_of_float(-2.5F), bits_of_float(-6),
               bits_of_float(1.5F), bits_of_float(-4), bits_of_float(-1.25F));
    ASSERT_ALL(SIM_NCCL_DOUBLE, bits_of_double(0x1p60), bits_of_double(256), bits_of_double(0x1p60 + 256),
               bits_of_double(0x1p68), bits_of_double(0x1p60), bits_of_double(256), bits_of_double(0x1p59 + 128));
    ASSERT_ALL(SIM_NCCL_HALF, 0x3e00, 0xc400, 0xc100, 0xc600, 0x3e00, 0xc400, 0xbd00);     /* 1.5, -4 */
    ASSERT_ALL(SIM_NCCL_BFLOAT16, 0x3fc0, 0xc080, 0xc020, 0xc0c0, 0x3fc0, 0xc080, 0xbfa0); /* the same */
    ASSERT_ALL(SIM_NCCL_FLOAT8_E4M3, 0x3c, 0xc8, 0xc2, 0xcc, 0x3c, 0xc8, 0xba);
    ASSERT_ALL(SIM_NCCL_FLOAT8_E5M2, 0x3e, 0xc4, 0xc1, 0xc6, 0x3e, 0xc4, 0xbd);
}

static void rounding_and_limits(void **state) {
    (void)state;
    ASSERT_REDUCED(SIM_NCCL_BFLOAT16, SIM_NCCL_SUM, 0x4380, 0x3f80, 0x4380); /* 256 + 1: the tie goes to the even one */
    ASSERT_REDUCED(SIM_NCCL_BFLOAT16, SIM_NCCL_SUM, 0x4380, 0x4040, 0x4382); /* 256 + 3 */
    ASSERT_REDUCED(SIM_NCCL_HALF, SIM_NCCL_SUM, 0x7bff, 0x7bff, 0x7c00);     /* twice 65504 */
    ASSERT_REDUCED(SIM_NCCL_HALF, SIM_NCCL_SUM, 0x0001, 0x0001, 0x0002);     /* subnormal */
    ASSERT_REDUCED(SIM_NCCL_HALF, SIM_NCCL_SUM, 0x03ff, 0x0001, 0x0400);     /* no longer */
    ASSERT_REDUCED(SIM_NCCL_FLOAT8_E4M3, SIM_NCCL_SUM, 0x7e, 0x7e, 0x7e);    /* 448 is the largest */
    ASSERT_REDUCED(SIM_NCCL_FLOAT8_E5M2, SIM_NCCL_SUM, 0x7b, 0x7b, 0x7c);    /* this one has an infinity */
    ASSERT_REDUCED(SIM_NCCL_FLOAT, SIM_NCCL_MAXIMUM, bits_of_float(NAN), bits_of_float(2), bits_of_float(2));
    ASSERT_REDUCED(SIM_NCCL_FLOAT, SIM_NCCL_MINIMUM, bits_of_float(2), bits_of_float(NAN), bits_of_float(2));
    assert_true((reduce(SIM_NCCL_HALF, SIM_NCCL_SUM, 2, (const uint64_t[]){0x7c00, 0xfc00}) & 0x7fff) > 0x7c00);
}

/* Computed as floats and rounded once: with a rounding in between, the 1s would be lost. */
static void narrow_numbers_are_rounded_once(void **state) {
    const uint64_t elements[] = {0x4380, 0x3f80, 0x3f80}; /* 256 + 1 + 1, of which 258 is the nearest */
    (void)state;
    assert_int_equal(reduce(SIM_NCCL_BFLOAT16, SIM_NCCL_SUM, RANKS, elements), 0x4381);
}

static void a_reduction_of_the_programs_multiplies_first(void **state) {
    rank_t ranks[RANKS];
    int reduction[RANKS], on_device[RANKS];
    float *factors[RANKS];
    (void)state;
    make_ranks(ranks, RANKS, 4);
    for (int i = 0; i < RANKS; i++) {
        float value = 10, factor = (float)(i + 1);
        ASSERT_CUDA(CALL(cudaSetDevice, i));
        ASSERT_CUDA(CALL(cudaMalloc, (void **)&factors[i], 4));
        memcpy(ranks[i].source, &value, 4);
        ASSERT_NCCL(
            CALL(ncclRedOpCreatePreMulSum, &reduction[i], &factor, SIM_NCCL_FLOAT, SIM_NCCL_SCALAR_ON_HOST, ranks[i].comm));
        ASSERT_NCCL(CALL(ncclRedOpCreatePreMulSum, &on_device[i], factors[i], SIM_NCCL_FLOAT, SIM_NCCL_SCALAR_ON_DEVICE,
                         ranks[i].comm));
        assert_int_not_equal(reduction[i], on_device[i]);
        assert_int_equal(CALL(ncclAllReduce, ranks[i].source, ranks[i].destination, 1, SIM_NCCL_INT32, reduction[i],
                              ranks[i].comm, ranks[i].stream),
                         SIM_NCCL_INVALID_ARGUMENT); /* it is a float */
    }
    for (int i = 0; i < RANKS; i++) {
        ASSERT_NCCL(CALL(ncclAllReduce, ranks[i].source, ranks[i].destination, 1, SIM_NCCL_FLOAT, reduction[i],
                         ranks[i].comm, ranks[i].stream));
        ASSERT_NCCL(CALL(ncclRedOpDestroy, reduction[i], ranks[i].comm)); /* before the work is done */
    }
    synchronize(ranks, RANKS);
    for (int i = 0; i < RANKS; i++) assert_float_equal(*(float *)ranks[i].destination, 60, 0);
    for (int i = 0; i < RANKS; i++) { /* the work reads a factor in device memory */
        *factors[i] = 0.5F;
        ASSERT_NCCL(CALL(ncclAllReduce, ranks[i].source, ranks[i].destination, 1, SIM_NCCL_FLOAT, on_device[i],
                         ranks[i].comm, ranks[i].stream));
    }
    synchronize(ranks, RANKS);
    for (int i = 0; i < RANKS; i++) {
        assert_float_equal(*(float *)ranks[i].destination, 15, 0);
        assert_int_equal(CALL(ncclRedOpDestroy, reduction[i], ranks[i].comm), SIM_NCCL_INVALID_ARGUMENT);
        ASSERT_CUDA(CALL(cudaFree, factors[i]));
    }
    drop_ranks(ranks, RANKS);
}

/* A residence that is not the host is the device. */
static void arguments_of_a_reduction_are_checked(void **state) {
    rank_t ranks[1];
    int reduction = -1;
    const float factor = 3;
    (void)state;
    make_ranks(ranks, 1, 8);
    float *device = (float *)ranks[0].source;
    device[0] = 2;
    device[1] = 10;
    sim_nccl_handle_t comm = ranks[0].comm;
    assert_int_equal(
        CALL(ncclRedOpCreatePreMulSum, &reduction, (void *)&factor, SIM_NCCL_TYPES, SIM_NCCL_SCALAR_ON_HOST, comm),
        SIM_NCCL_INTERNAL);
    assert_int_equal(CALL(ncclRedOpCreatePreMulSum, &reduction, NULL, SIM_NCCL_FLOAT, SIM_NCCL_SCALAR_ON_HOST, comm),
                     SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(CALL(ncclRedOpCreatePreMulSum, NULL, (void *)&factor, SIM_NCCL_FLOAT, SIM_NCCL_SCALAR_ON_HOST, comm),
                     SIM_NCCL_INVALID_ARGUMENT);
    assert_int_equal(reduction, -1);
    ASSERT_NCCL(CALL(ncclRedOpCreatePreMulSum, &reduction, device, SIM_NCCL_FLOAT, 7, comm));
    device[0] = 4; /* read by the operation */
    ASSERT_NCCL(CALL(ncclAllReduce, device + 1, device + 1, 1, SIM_NCCL_FLOAT, reduction, comm, ranks[0].stream));
    synchronize(ranks, 1);
    assert_float_equal(device[1], 40, 0);
    drop_ranks(ranks, 1);
}

int main(void) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_more_gpus, teardown_gpus)
    const struct CMUnitTest tests[] = {
        TEST(whole_numbers),
        TEST(floating_point_numbers),
        TEST(rounding_and_limits),
        TEST(narrow_numbers_are_rounded_once),
        TEST(a_reduction_of_the_programs_multiplies_first),
        TEST(arguments_of_a_reduction_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
