/* Shared by the tests of the simulated GPU's kernels: PyTorch's names and argument structures, made by hand. */
#ifndef TMS_TESTS_KERNELS_FIXTURE_H
#define TMS_TESTS_KERNELS_FIXTURE_H

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

#define KERNEL_TEST(function) cmocka_unit_test_setup_teardown(function, setup_one_gpu, teardown_gpus)

#endif
