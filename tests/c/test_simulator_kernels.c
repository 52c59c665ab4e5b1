/* The simulated GPU's kernels: PyTorch's names and argument structures, made by hand. The names were recorded from PyTorch
 * 2.11, and two from other versions, which write them differently. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "captured_stderr.h"
#include "simulated_cuda.h"

enum { ELEMENTS = 1001, GATE = 1, INVALID_DEVICE_FUNCTION = 98, INVALID_CONFIGURATION = 9, NOT_SUPPORTED = 801 };
enum { TYPE_UINT8 = 0, TYPE_HALF = 5, TYPE_FLOAT = 6, TYPE_BFLOAT16 = 15 };

static const char fill_float[] =
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_";
static const char add_int64[] =
    "_ZN2at6native29vectorized_elementwise_kernelILi2ENS0_15CUDAFunctor_addIlEESt5arrayIPcLm3EEEEviT0_T1_";
static const char add_to_float[] =
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_21CUDAFunctorOnSelf_addIfEESt5arrayIPcLm2EEEEviT0_T1_";
static const char multiply_bfloat16[] = "_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_"
                                        "13AUnaryFunctorIN3c108BFloat16ES4_S4_NS0_15binary_internal10MulFunc"
                                        "torIfEEEESt5arrayIPcLm2EEEEviT0_T1_";
static const char equal_uint8[] = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_13BinaryFunctorIhhbNS0_51_GLOBAL__N_"
                                  "_28ce311f_18_CompareEQKernel_cu"
                                  "_d8008c9616CompareEqFunctorIhEEEESt5arrayIPcLm3EEEEviT0_T1_";
static const char convert_to_half[] = "_ZN2at6native27unrolled_elementwise_kernelIZZZNS0_23direct_copy_kernel_cudaERNS_"
                                      "18TensorIteratorBaseEENKUlvE1_clEvENKUlv"
                                      "E8_clEvEUlN3c104HalfEE_St5arrayIPcLm2EELi4E23TrivialOffsetCalculatorILi1EjESD_NS0_"
                                      "6memory12LoadWithCastILi1EEENSE_13Stor"
                                      "eWithCastILi1EEEEEviT_T0_T2_T3_T4_T5_";
static const char strided_copy_uint8[] = "_ZN2at6native18elementwise_kernelILi128ELi4EZNS0_22gpu_kernel_impl_nocastIZZZNS0_"
                                         "23direct_copy_kernel_cudaERNS_18TensorI"
                                         "teratorBaseEENKUlvE1_clEvENKUlvE_clEvEUlhE_EEvS4_RKT_EUliE_EEviT1_";
static const char sum_int64[] = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIlNS0_14func_wrapper_tIlZNS0_11sum_"
                                "functorIlllEclERNS_14TensorIterat"
                                "orEEUlllE_EEjlLi4ELi4EEEEEvT1_";
static const char all_bool[] = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIbNS0_14func_wrapper_tIbZZZNS0_15and_"
                               "kernel_cudaERNS_14TensorIterato"
                               "rEENKUlvE_clEvENKUlvE10_clEvEUlbbE_EEjbLi4ELi4EEEEEvT1_";
static const char fill_float_2_15[] =
    "_ZN2at6native29vectorized_elementwise_kernelILi8ENS0_11FillFunctorIfEESt5arrayIPcLm1EELb0EEEviT0_T1_";
static const char sum_int64_2_6[] = "_ZN2at6native13reduce_kernelILi128ELi4ENS0_8ReduceOpIlNS0_14func_wrapper_tIlZNS0_11sum_"
                                    "functorIlllEclERNS_14TensorIterat"
                                    "orEEUlllE_EEjlLi4EEEEEvT1_";
static const char matrix_product[] = "_ZN7cutlass6KernelI4gemmEEvT_";
static const char fill_complex[] =
    "_ZN2at6native29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIN3c107complexIfEEEESt5arrayIPcLm1EEEEviT0_T1_";
static const char spin[] = "_ZN2at4cuda12_GLOBAL__N_111spin_kernelEl";

/* As PyTorch's templates lay them out. */
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

static void *entry(const char *name) {
    void *library = dlopen(getenv("TMS_CUDA_DRIVER"), RTLD_NOW | RTLD_NOLOAD);
    void *address = dlsym(library, name);
    assert_non_null(address);
    dlclose(library);
    return address;
}

static void **register_kernel(const char *name) {
    void **(*add_module)(void *) = (void **(*)(void *))entry("__cudaRegisterFatBinary");
    void (*add)(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) =
        (void (*)(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *))entry(
            "__cudaRegisterFunction");
    void **module = add_module(NULL);
    add(module, name, NULL, name, -1, NULL, NULL, NULL, NULL, NULL); /* the name's address stands for the stub's */
    return module;
}

static void unregister(void **module) { ((void (*)(void **))entry("__cudaUnregisterFatBinary"))(module); }

static CUresult launch_on(const char *kernel, void **arguments, CUstream stream) {
    const sim_dim3_t one = {1, 1, 1};
    void **module = register_kernel(kernel);
    CUresult result = CALL(cudaLaunchKernel, kernel, one, one, arguments, 0, stream);
    unregister(module);
    return result;
}

static CUresult launch(const char *kernel, void **arguments) { return launch_on(kernel, arguments, NULL); }

static void finish(void) { ASSERT_CUDA(CALL(cudaDeviceSynchronize)); }

static void *bytes_of(const block_t *block) { return (void *)(uintptr_t)block->address; }

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

static void tells_whether_all_are_true(void **state) {
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

/* More elements than are computed at a time, and a sum that only double holds until it is rounded. */
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

/* The same sums over dense memory and, where an operand is not aligned, number by number. */
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

static void copies_its_arguments_and_keeps_the_order(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = NULL;
    int count = ELEMENTS;
    float value = 1.0F, *floats = bytes_of(&block), added[2] = {2.0F, 1.0F}; /* the number and its factor */
    void *pointers[] = {floats, floats}, *fills[] = {&count, &value, pointers}, *adds[] = {&count, added, pointers};
    (void)state;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(launch_add, stream, block.address + GRANULE - 1, 1, 1, GATE));
    ASSERT_CUDA(launch_on(fill_float, fills, stream));
    ASSERT_CUDA(launch_on(add_to_float, adds, stream));
    value = added[0] = 100.0F;
    pointers[0] = NULL;
    count = 0;
    assert_bytes(block.address, ELEMENTS * sizeof *floats, TMS_SIM_POISON); /* nothing has run */
    CALL(open_gate, GATE);
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    for (int i = 0; i < ELEMENTS; i++) assert_true(floats[i] == 3.0F);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
}

static void is_recorded_and_replayed(void **state) {
    block_t block = make_block(0, GRANULE);
    CUstream stream = NULL;
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    int count = ELEMENTS;
    float added[2] = {2.0F, 1.0F}, *floats = bytes_of(&block);
    void *pointers[] = {floats, floats}, *adds[] = {&count, added, pointers};
    (void)state;
    memset(floats, 0, ELEMENTS * sizeof *floats);
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(launch_on(add_to_float, adds, stream));
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    assert_true(floats[0] == 0.0F);
    ASSERT_CUDA(CALL(cuGraphInstantiateWithFlags, &executable, graph, 0));
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    for (int i = 0; i < 3; i++) ASSERT_CUDA(CALL(cuGraphLaunch, executable, stream));
    ASSERT_CUDA(CALL(cuGraphExecDestroy, executable)); /* what was launched still runs */
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    for (int i = 0; i < ELEMENTS; i++) assert_true(floats[i] == 6.0F);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
}

static void crosses_mappings_and_faults_where_one_is_missing(void **state) {
    CUmemGenericAllocationHandle handles[2];
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr address = 0;
    int count = (int)(2 * GRANULE / sizeof(float)) - 1;
    float value = 1.0F;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 2 * GRANULE, 0, 0, 0));
    for (int i = 0; i < 2; i++) {
        ASSERT_CUDA(CALL(cuMemCreate, &handles[i], GRANULE, &properties, 0));
        ASSERT_CUDA(CALL(cuMemMap, address + (uint64_t)i * GRANULE, GRANULE, 0, handles[i], 0));
    }
    ASSERT_CUDA(CALL(cuMemSetAccess, address, 2 * GRANULE, &access, 1));
    /* One element lies in both mappings. */
    float *floats = (float *)(uintptr_t)address;
    void *pointers[] = {(void *)(uintptr_t)(address + 2)}, *arguments[] = {&count, &value, pointers};
    ASSERT_CUDA(launch(fill_float, arguments));
    finish();
    for (int i = 0; i < count; i++) {
        float element;
        memcpy(&element, (uint8_t *)floats + 2 + (size_t)i * sizeof element, sizeof element);
        assert_true(element == 1.0F);
    }
    ASSERT_CUDA(CALL(cuMemUnmap, address + GRANULE, GRANULE));
    value = 2.0F;
    ASSERT_CUDA(launch(fill_float, arguments)); /* as a real launch: the fault comes later, and stays */
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, CALL(cudaDeviceSynchronize));
    ASSERT_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, launch(fill_float, arguments));
    ASSERT_CUDA(CALL(cuMemUnmap, address, GRANULE));
    for (int i = 0; i < 2; i++) ASSERT_CUDA(CALL(cuMemRelease, handles[i]));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 2 * GRANULE));
}

static void other_kernels_are_errors_or_skipped(void **state) {
    const sim_dim3_t one = {1, 1, 1}, none = {0, 1, 1};
    void *arguments[] = {NULL};
    char text[4096];
    (void)state;
    captured_stderr_t captured = capture_begin();
    ASSERT_RESULT(NOT_SUPPORTED, launch(matrix_product, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, launch(matrix_product, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, launch(fill_complex, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, CALL(cudaGetLastError));
    CALL(skip_kernels, 1);
    ASSERT_CUDA(launch(matrix_product, arguments));
    assert_int_equal(CALL(kernels_skipped), 1);
    CALL(skip_kernels, 0);
    ASSERT_CUDA(launch(spin, arguments)); /* always */
    assert_int_equal(CALL(kernels_skipped), 2);
    assert_int_equal(CALL(kernels_launched), 0);
    ASSERT_RESULT(INVALID_DEVICE_FUNCTION, CALL(cudaLaunchKernel, matrix_product, one, one, arguments, 0, NULL));
    ASSERT_RESULT(INVALID_CONFIGURATION, CALL(cudaLaunchKernel, matrix_product, none, one, arguments, 0, NULL));
    capture_end(captured, text, sizeof text);
    /* In C++'s words where its library is loaded, so only parts of the names are looked for. */
    assert_int_equal(count_lines(text), 2); /* each is named once */
    assert_non_null(strstr(text, "cutlass"));
    assert_non_null(strstr(text, "FillFunctor"));
    assert_null(strstr(text, "spin_kernel"));
}

#define KERNEL_TEST(function) cmocka_unit_test_setup_teardown(function, setup_one_gpu, teardown_gpus)

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
        KERNEL_TEST(tells_whether_all_are_true),
        KERNEL_TEST(copies_its_arguments_and_keeps_the_order),
        KERNEL_TEST(is_recorded_and_replayed),
        KERNEL_TEST(crosses_mappings_and_faults_where_one_is_missing),
        KERNEL_TEST(other_kernels_are_errors_or_skipped),
    };
    return cmocka_run_group_tests_name("simulated kernels", tests, NULL, NULL);
}
