/* Guards launches of kernels: the few that the simulated GPU implements, the refusal of all others, and the registry. The
 * names were recorded from PyTorch 2.11. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "captured_stderr.h"
#include "simulated_cuda.h"

enum { INVALID_DEVICE_FUNCTION = 98, INVALID_CONFIGURATION = 9, NOT_SUPPORTED = 801, TEXT_BYTES = 4096 };

static const char spin[] = "_ZN2at4cuda12_GLOBAL__N_111spin_kernelEl";
static const char random_int64[] =
    "_ZN2at6native60_GLOBAL__N__2b2da9da_27_DistributionRandomKernel_cu_f88cee4443distribution_elementwise_grid_str"
    "ide_kernelImLi2EZZZNS0_9templates4cuda13random_kernelIPNS_17CUDAGeneratorImplEEEvRNS_18TensorIteratorBaseET_EN"
    "KUlvE_clEvENKUlvE8_clEvEUlP24curandStatePhilox4_32_10E_ZNS1_27distribution_nullary_kernelIbm10ulonglong2S7_SF_"
    "ZZZS5_IS7_EvS9_SA_ENKSB_clEvENKSC_clEvEUlmE_EEvS9_T2_RKT3_T4_EUlimE0_EEvlNS_15PhiloxCudaStateET1_SJ_";
static const char fill_float[] =
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_";
static const char matrix_product[] = "_ZN7cutlass6KernelI4gemmEEvT_";

/* PyTorch's PhiloxCudaState: the values, or in a capture their addresses and an addend of the offset. */
typedef struct generator {
    uint64_t seed, offset;
    uint32_t addend;
    bool captured;
} generator_t;

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

static void other_kernels_are_errors_that_name_the_kernel(void **state) {
    const sim_dim3_t one = {1, 1, 1}, none = {0, 1, 1};
    void *arguments[] = {NULL};
    char text[TEXT_BYTES];
    (void)state;
    captured_stderr_t captured = capture_begin();
    ASSERT_RESULT(NOT_SUPPORTED, launch(matrix_product, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, launch(matrix_product, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, launch(fill_float, arguments));
    ASSERT_RESULT(NOT_SUPPORTED, CALL(cudaGetLastError));
    ASSERT_CUDA(CALL(cudaDeviceSynchronize)); /* such an error is not sticky */
    ASSERT_RESULT(INVALID_DEVICE_FUNCTION, CALL(cudaLaunchKernel, matrix_product, one, one, arguments, 0, NULL));
    ASSERT_RESULT(INVALID_CONFIGURATION, CALL(cudaLaunchKernel, matrix_product, none, one, arguments, 0, NULL));
    capture_end(captured, text, sizeof text);
    /* In C++ notation if its library is loaded, so only parts of the names are checked. */
    assert_int_equal(count_lines(text), 2); /* each is named once */
    assert_non_null(strstr(text, "cutlass"));
    assert_non_null(strstr(text, "FillFunctor"));
}

/* torch.cuda._sleep: for longer than the test takes, until its context is destroyed. */
static void a_sleep_occupies_its_stream_and_no_other(void **state) {
    int64_t centuries = INT64_MAX, nothing = 0;
    void *arguments[] = {&centuries}, *no_time[] = {&nothing};
    CUstream asleep = NULL, awake = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cuStreamCreate, &asleep, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamCreate, &awake, CU_STREAM_NON_BLOCKING));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, launch_on(spin, NULL, awake));
    ASSERT_CUDA(launch_on(spin, arguments, asleep));
    ASSERT_CUDA(launch_on(spin, no_time, awake));
    ASSERT_CUDA(CALL(cuStreamSynchronize, awake));
    ASSERT_RESULT(CUDA_ERROR_NOT_READY, CALL(cuStreamQuery, asleep));
    CALL(reset, 1, DEVICE_MEMORY);
}

static void a_sleep_is_captured_and_replayed(void **state) {
    int64_t nothing = 0;
    void *arguments[] = {&nothing};
    CUstream stream = NULL;
    CUgraph graph = NULL;
    CUgraphExec executable = NULL;
    size_t nodes = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    ASSERT_CUDA(launch_on(spin, arguments, stream));
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    ASSERT_CUDA(CALL(cuGraphGetNodes, graph, NULL, &nodes));
    assert_int_equal(nodes, 1);
    ASSERT_CUDA(CALL(cuGraphInstantiateWithFlags, &executable, graph, 0));
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    ASSERT_CUDA(CALL(cuGraphLaunch, executable, stream));
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    ASSERT_CUDA(CALL(cuGraphExecDestroy, executable));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
}

static void a_random_kernel_gives_its_generators_state(void **state) {
    int64_t count = 1;
    generator_t generator = {.seed = 3, .offset = 8, .addend = UINT32_MAX};
    void *arguments[] = {&count, &generator};
    tms_sim_draw_t draw;
    (void)state;
    CALL(begin_draw);
    assert_int_equal(CALL(end_draw, &draw), 1); /* nothing was launched */
    CALL(begin_draw);
    ASSERT_CUDA(launch(random_int64, arguments));
    assert_int_equal(CALL(end_draw, &draw), 0);
    assert_int_equal(draw.seed, 3);
    assert_int_equal(draw.offset, 8);
    assert_int_equal(draw.addend, 0);
    assert_false(draw.captured);
}

static void a_captured_random_kernel_gives_addresses(void **state) {
    int64_t count = 1;
    generator_t generator = {.seed = 0x1000, .offset = 0x2000, .addend = 4, .captured = true};
    void *arguments[] = {&count, &generator};
    tms_sim_draw_t draw;
    CUstream stream = NULL;
    CUgraph graph = NULL;
    size_t nodes = 1;
    (void)state;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CALL(begin_draw);
    ASSERT_CUDA(launch_on(random_int64, arguments, stream));
    assert_int_equal(CALL(end_draw, &draw), 0);
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    ASSERT_CUDA(CALL(cuGraphGetNodes, graph, NULL, &nodes));
    assert_int_equal(nodes, 0); /* the launch itself is not recorded */
    assert_int_equal(draw.seed, 0x1000);
    assert_int_equal(draw.offset, 0x2000);
    assert_int_equal(draw.addend, 4);
    assert_true(draw.captured);
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
}

static void a_random_kernel_outside_a_draw_is_refused(void **state) {
    int64_t count = 1;
    generator_t generator = {.seed = 3};
    void *arguments[] = {&count, &generator};
    char text[TEXT_BYTES];
    (void)state;
    captured_stderr_t captured = capture_begin();
    ASSERT_RESULT(NOT_SUPPORTED, launch(random_int64, arguments));
    capture_end(captured, text, sizeof text);
    assert_non_null(strstr(text, "distribution_elementwise_grid_stride_kernel"));
}

#define KERNEL_TEST(function) cmocka_unit_test_setup_teardown(function, setup_one_gpu, teardown_gpus)

int main(void) {
    const struct CMUnitTest tests[] = {
        KERNEL_TEST(other_kernels_are_errors_that_name_the_kernel),
        KERNEL_TEST(a_sleep_occupies_its_stream_and_no_other),
        KERNEL_TEST(a_sleep_is_captured_and_replayed),
        KERNEL_TEST(a_random_kernel_gives_its_generators_state),
        KERNEL_TEST(a_captured_random_kernel_gives_addresses),
        KERNEL_TEST(a_random_kernel_outside_a_draw_is_refused),
    };
    return cmocka_run_group_tests_name("simulated kernels", tests, NULL, NULL);
}
