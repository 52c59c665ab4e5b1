/* Guards the results of the simulated GPU's kernels. PyTorch's names and argument structures are made by hand; the names
 * were recorded from PyTorch 2.11, and two from other versions, which mangle them differently. */
#include "support/kernels_fixture.h"

/* The layout of PyTorch's templates. */
typedef struct divider {
    uint32_t divisor, magic, shift;
} divider_t;

#define OFFSETS(operands)                                                                                                   \
    struct {                                                                                                                \
        int dims;                                                                                                           \
        divider_t sizes[25];                                                                                                \
        uint32_t strides[25][operands];                                                                                     \
    }

typedef struct config {
    int element_bytes, inputs, outputs, unused[11];
    bool vectorized;
    int output_vector;
} config_t;

#define REDUCTION(start_type)                                                                                               \
    struct {                                                                                                                \
        char operation;                                                                                                     \
        start_type start;                                                                                                   \
        config_t config;                                                                                                    \
        OFFSETS(1) input;                                                                                                   \
        OFFSETS(2) output;                                                                                                  \
        void *source, *destinations[2], *buffers[2];                                                                        \
        int *semaphores;                                                                                                    \
        int64_t base;                                                                                                       \
        bool accumulates, final;                                                                                            \
        int outputs;                                                                                                        \
    }

static void fills_only_its_elements(void **state) {
    block_t block = make_block(0, GRANULE);
    int count = ELEMENTS;
    float value = 2.5F, *floats = bytes_of(&block);
    void *pointers[] = {floats}, *arguments[] = {&count, &value, pointers};
    (void)state;
    ASSERT_CUDA(launch(fill_float, arguments));
    finish();
    for (int i = 0; i < ELEMENTS; i++) assert_true(floats[i] == 2.5F);
    assert_bytes(block.address + ELEMENTS * sizeof *floats, 64, TMS_SIM_POISON);
    value = 3.5F;
    ASSERT_CUDA(launch(fill_float_2_15, arguments));
    finish();
    assert_true(floats[ELEMENTS - 1] == 3.5F);
    assert_int_equal(CALL(kernels_launched), 2);
    drop_block(&block);
}

static void adds_with_a_factor(void **state) {
    block_t block = make_block(0, GRANULE);
    int count = ELEMENTS;
    int64_t alpha = -3, *numbers = bytes_of(&block);
    void *pointers[] = {numbers + 2 * ELEMENTS, numbers, numbers + ELEMENTS}, *arguments[] = {&count, &alpha, pointers};
    (void)state;
    for (int i = 0; i < ELEMENTS; i++) {
        numbers[i] = INT64_C(1) << 60;
        numbers[ELEMENTS + i] = i;
    }
    ASSERT_CUDA(launch(add_int64, arguments));
    finish();
    for (int i = 0; i < ELEMENTS; i++) assert_int_equal(numbers[2 * ELEMENTS + i], (INT64_C(1) << 60) - 3 * i);
    drop_block(&block);
}

static void multiplies_small_floats(void **state) {
    block_t block = make_block(0, GRANULE);
    int count = 4;
    struct {
        char functor;
        float number;
    } functor = {0, 3.0F};
    uint16_t *numbers = bytes_of(&block);
    const uint16_t values[] = {0x3f80 /* 1 */, 0xc040 /* -3 */, 0x3f81 /* 1.0078125: 3.0234375 is a tie */,
                               0x7f80 /* inf */};
    const uint16_t expected[] = {0x4040, 0xc110, 0x4042, 0x7f80};
    void *pointers[] = {numbers + 4, numbers}, *arguments[] = {&count, &functor, pointers};
    (void)state;
    memcpy(numbers, values, sizeof values);
    ASSERT_CUDA(launch(multiply_bfloat16, arguments));
    finish();
    assert_memory_equal(numbers + 4, expected, sizeof expected);
    drop_block(&block);
}

static void compares(void **state) {
    block_t block = make_block(0, GRANULE);
    int count = 3, not_equal = 1, equal = 0;
    uint8_t *bytes = bytes_of(&block);
    void *pointers[] = {bytes + 6, bytes, bytes + 3}, *arguments[] = {&count, &equal, pointers};
    (void)state;
    memcpy(bytes, "abcxbz", 6);
    ASSERT_CUDA(launch(equal_uint8, arguments));
    finish();
    assert_memory_equal(bytes + 6, "\0\1\0", 3);
    arguments[1] = &not_equal;
    ASSERT_CUDA(launch(equal_uint8, arguments));
    finish();
    assert_memory_equal(bytes + 6, "\1\0\1", 3);
    drop_block(&block);
}

static void converts_to_the_types_in_its_arguments(void **state) {
    block_t block = make_block(0, GRANULE);
    int count = 8;
    char empty = 0;
    struct {
        int8_t type;
        uint32_t bytes;
    } loader = {TYPE_FLOAT, sizeof(float)}, storer = {TYPE_HALF, sizeof(uint16_t)};
    const float values[8] = {0.0F, -0.0F, 1.0F, 65519.0F, 65520.0F, 0x1p-24F, 0x1p-25F, 2049.0F};
    const uint16_t expected[8] = {0, 0x8000, 0x3c00, 0x7bff, 0x7c00, 1, 0, 0x6800};
    uint8_t *bytes = bytes_of(&block);
    void *pointers[] = {bytes + sizeof values, bytes};
    void *arguments[] = {&count, &empty, pointers, &empty, &empty, &loader, &storer};
    (void)state;
    memcpy(bytes, values, sizeof values);
    ASSERT_CUDA(launch(convert_to_half, arguments));
    finish();
    assert_memory_equal(bytes + sizeof values, expected, sizeof expected);
    loader.type = 77;
    ASSERT_RESULT(NOT_SUPPORTED, launch(convert_to_half, arguments)); /* no such type */
    drop_block(&block);
}

static void copies_with_strides(void **state) {
    block_t block = make_block(0, GRANULE);
    int count = 6;
    struct {
        OFFSETS(2) offsets;
        void *pointers[2];
        char functor;
    } closure = {.offsets = {.dims = 2, .sizes = {{.divisor = 2}, {.divisor = 3}}, .strides = {{1, 3}, {2, 1}}}};
    uint8_t *bytes = bytes_of(&block);
    void *arguments[] = {&count, &closure};
    (void)state;
    memcpy(bytes, "abcdef", 6); /* two rows of three, to be transposed */
    closure.pointers[0] = bytes + 6;
    closure.pointers[1] = bytes;
    ASSERT_CUDA(launch(strided_copy_uint8, arguments));
    finish();
    assert_memory_equal(bytes + 6, "adbecf", 6);
    drop_block(&block);
}

static void sums_each_row(void **state) {
    block_t block = make_block(0, GRANULE);
    REDUCTION(int64_t) reduction;
    void *arguments[] = {&reduction};
    int64_t *numbers = bytes_of(&block);
    (void)state;
    memset(&reduction, 0, sizeof reduction);
    for (int i = 0; i < 3 * ELEMENTS; i++) numbers[i] = i;
    reduction.config.inputs = ELEMENTS;
    reduction.config.outputs = 3;
    reduction.input.dims = reduction.output.dims = 1;
    reduction.input.sizes[0].divisor = ELEMENTS;
    reduction.input.strides[0][0] = sizeof *numbers;
    reduction.output.sizes[0].divisor = 3;
    reduction.output.strides[0][0] = sizeof *numbers;
    reduction.output.strides[0][1] = ELEMENTS * sizeof *numbers;
    reduction.source = numbers;
    reduction.destinations[0] = numbers + 3 * ELEMENTS;
    reduction.final = true;
    ASSERT_CUDA(launch(sum_int64, arguments));
    finish();
    for (int row = 0; row < 3; row++) {
        int64_t expected = (int64_t)ELEMENTS * ELEMENTS * row + (int64_t)ELEMENTS * (ELEMENTS - 1) / 2;
        assert_int_equal(numbers[3 * ELEMENTS + row], expected);
    }
    numbers[3 * ELEMENTS] = 0;
    ASSERT_CUDA(launch(sum_int64_2_6, arguments));
    finish();
    assert_int_equal(numbers[3 * ELEMENTS], (int64_t)ELEMENTS * (ELEMENTS - 1) / 2);
    reduction.final = false;
    ASSERT_RESULT(NOT_SUPPORTED, launch(sum_int64, arguments)); /* into a buffer of its own */
    drop_block(&block);
}

static void reports_whether_all_are_true(void **state) {
    block_t block = make_block(0, GRANULE);
    REDUCTION(bool) reduction;
    void *arguments[] = {&reduction};
    uint8_t *bytes = bytes_of(&block);
    (void)state;
    memset(&reduction, 0, sizeof reduction);
    memset(bytes, 1, ELEMENTS);
    reduction.config.inputs = ELEMENTS;
    reduction.config.outputs = 1;
    reduction.input.dims = 1;
    reduction.input.sizes[0].divisor = ELEMENTS;
    reduction.input.strides[0][0] = 1;
    reduction.source = bytes;
    reduction.destinations[0] = bytes + ELEMENTS;
    reduction.final = true;
    ASSERT_CUDA(launch(all_bool, arguments));
    finish();
    assert_int_equal(bytes[ELEMENTS], 1);
    bytes[ELEMENTS - 1] = 0;
    ASSERT_CUDA(launch(all_bool, arguments));
    finish();
    assert_int_equal(bytes[ELEMENTS], 0);
    bytes[ELEMENTS - 1] = 2; /* whatever is not 0 is true */
    ASSERT_CUDA(launch(all_bool, arguments));
    finish();
    assert_int_equal(bytes[ELEMENTS], 1);
    drop_block(&block);
}

/* More elements than are computed in one step, and a sum that only double holds until it is rounded. */
static void adds_a_number_to_each_element(void **state) {
    block_t block = make_block(0, GRANULE);
    int count = ELEMENTS;
    float added[2] = {0x1p-24F, 1.0F}, *floats = bytes_of(&block);
    void *pointers[] = {floats + ELEMENTS, floats}, *arguments[] = {&count, added, pointers};
    (void)state;
    for (int i = 0; i < ELEMENTS; i++) floats[i] = (float)i;
    ASSERT_CUDA(launch(add_to_float, arguments));
    finish();
    for (int i = 0; i < ELEMENTS; i++) assert_true(floats[ELEMENTS + i] == (float)((double)i + 0x1p-24));
    assert_bytes(block.address + 2 * ELEMENTS * sizeof *floats, 64, TMS_SIM_POISON);
    drop_block(&block);
}

/* The same sums over dense memory and, if an operand is not aligned, element by element. */
static void dense_and_general_arithmetic_agree(void **state) {
    block_t block = make_block(0, GRANULE);
    uint8_t *bytes = bytes_of(&block);
    int count = ELEMENTS;
    int64_t alpha = INT64_MAX, *aligned = bytes_of(&block), wrapped = 0;
    void *pointers[3], *arguments[] = {&count, &alpha, pointers};
    (void)state;
    for (int i = 0; i < 2 * ELEMENTS; i++) aligned[i] = INT64_MAX - i;
    memcpy(bytes + MIB + 1, bytes, 2 * ELEMENTS * sizeof *aligned);
    for (int i = 0; i < 2; i++) {
        uint8_t *start = bytes + (i ? MIB + 1 : 0);
        pointers[0] = start + 2 * ELEMENTS * sizeof *aligned;
        pointers[1] = start;
        pointers[2] = start + ELEMENTS * sizeof *aligned;
        ASSERT_CUDA(launch(add_int64, arguments));
        finish();
    }
    memcpy(&wrapped, (uint8_t *)pointers[0] + sizeof wrapped, sizeof wrapped);
    assert_true((uint64_t)wrapped == (uint64_t)aligned[1] + (uint64_t)INT64_MAX * (uint64_t)aligned[ELEMENTS + 1]);
    assert_memory_equal(bytes, bytes + MIB + 1, 3 * ELEMENTS * sizeof *aligned);
    drop_block(&block);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KERNEL_TEST(fills_only_its_elements),
        KERNEL_TEST(adds_with_a_factor),
        KERNEL_TEST(adds_a_number_to_each_element),
        KERNEL_TEST(dense_and_general_arithmetic_agree),
        KERNEL_TEST(multiplies_small_floats),
        KERNEL_TEST(compares),
        KERNEL_TEST(converts_to_the_types_in_its_arguments),
        KERNEL_TEST(copies_with_strides),
        KERNEL_TEST(sums_each_row),
        KERNEL_TEST(reports_whether_all_are_true),
    };
    return cmocka_run_group_tests_name("simulated kernels", tests, NULL, NULL);
}
