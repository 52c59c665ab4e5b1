/* Parameter types of the CUDA runtime's functions, from its documentation. The runtime's header is not required to build
 * this, and the structures differ between its versions. Runtime errors use the driver's numbers. Owns nothing and needs
 * no lock. */
#ifndef TMS_SIM_BASE_RUNTIME_TYPES_H
#define TMS_SIM_BASE_RUNTIME_TYPES_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* cudaPointerAttributes. CUDA 13 appended reserved fields. A caller built for CUDA 12 has no room for them, so they are
 * not written. */
typedef struct sim_pointer_attributes {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
} sim_pointer_attributes_t;

/* cudaFuncAttributes; 16 reserved numbers follow, which are not written. */
typedef struct sim_function_attributes {
    size_t shared_bytes, constant_bytes, local_bytes;
    int max_threads_per_block;
    int registers;
    int ptx_version, binary_version;
    int cache_mode;
    int max_dynamic_shared_bytes;
    int preferred_carveout;
    int cluster_must_be_set, cluster_width, cluster_height, cluster_depth;
    int cluster_policy;
    int non_portable_cluster_allowed;
} sim_function_attributes_t;

struct CUctxCreateParams_st; /* missing in older cuda.h: sim_context_parameters_t */

/* CUctxCreateParams. */
typedef struct sim_context_parameters {
    void *affinities;
    int affinity_count;
    void *graphics;
} sim_context_parameters_t;

struct CUmulticastObjectProp_st; /* missing in older cuda.h */
struct CUmemcpyAttributes_st;    /* missing in older cuda.h: sim_copy_attributes_t */

/* CUmemcpyAttributes. */
typedef struct sim_copy_attributes {
    int source_order;
    CUmemLocation source_hint, target_hint;
    unsigned int flags;
} sim_copy_attributes_t;
enum { SIM_SOURCE_ORDERS = 3 }; /* valid values are 1 to 3: in stream order, during the call, any */

/* cudaStreamCallback_t and cudaHostFn_t. */
typedef void sim_stream_callback_t(CUstream stream, CUresult status, void *argument);
typedef void sim_host_function_t(void *argument);

/* dim3 and cudaLaunchConfig_t, from the documentation. */
typedef struct sim_dim3 {
    unsigned int x, y, z;
} sim_dim3_t;

typedef struct sim_launch_config {
    sim_dim3_t grid, block;
    size_t shared_bytes;
    CUstream stream;
    void *attributes;
    unsigned int attribute_count;
} sim_launch_config_t;

/* Errors of the runtime that have no driver equivalent: cudaErrorInvalidConfiguration and so on. */
enum {
    SIM_ERROR_INVALID_CONFIGURATION = 9,
    SIM_ERROR_MISSING_CONFIGURATION = 52,
    SIM_ERROR_INVALID_DEVICE_FUNCTION = 98,
};

/* Whether the program was built for CUDA 12. Some functions have the same name but other parameters there. */
bool sim_runtime_is_12(void);

/* The fields of cudaDeviceProp, in order. A field is FIELD(type, name, equivalent device attribute or 0), and an array is
 * ARRAY(type, name, count). CUDA 13 removed OLD_FIELD and OLD_ARRAY and added NEW_FIELD and NEW_ARRAY. */
#define SIM_PROPERTY_FIELDS(FIELD, ARRAY, OLD_FIELD, OLD_ARRAY, NEW_FIELD, NEW_ARRAY)                                       \
    ARRAY(char, name, 256)                                                                                                  \
    ARRAY(unsigned char, uuid, 16)                                                                                          \
    ARRAY(char, luid, 8)                                                                                                    \
    FIELD(unsigned int, luid_mask, 0)                                                                                       \
    FIELD(size_t, total_memory, 0)                                                                                          \
    FIELD(size_t, shared_per_block, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)                                        \
    FIELD(int, registers_per_block, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK)                                            \
    FIELD(int, warp_size, CU_DEVICE_ATTRIBUTE_WARP_SIZE)                                                                    \
    FIELD(size_t, pitch, CU_DEVICE_ATTRIBUTE_MAX_PITCH)                                                                     \
    FIELD(int, threads_per_block, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)                                                \
    ARRAY(int, block_dimensions, 3)                                                                                         \
    ARRAY(int, grid_dimensions, 3)                                                                                          \
    OLD_FIELD(int, clock_rate, CU_DEVICE_ATTRIBUTE_CLOCK_RATE)                                                              \
    FIELD(size_t, constant_memory, CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY)                                               \
    FIELD(int, major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)                                                         \
    FIELD(int, minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)                                                         \
    FIELD(size_t, texture_alignment, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT)                                                 \
    FIELD(size_t, texture_pitch_alignment, CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT)                                     \
    OLD_FIELD(int, overlap, CU_DEVICE_ATTRIBUTE_GPU_OVERLAP)                                                                \
    FIELD(int, multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)                                                   \
    OLD_FIELD(int, execution_timeout, CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT)                                              \
    FIELD(int, integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED)                                                                  \
    FIELD(int, can_map_host_memory, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY)                                                \
    OLD_FIELD(int, compute_mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)                                                          \
    ARRAY(int, textures_1d, 2)                                                                                              \
    OLD_FIELD(int, texture_1d_linear, 0)                                                                                    \
    ARRAY(int, textures_and_surfaces, 37)                                                                                   \
    FIELD(size_t, surface_alignment, CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT)                                                 \
    FIELD(int, concurrent_kernels, CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS)                                                  \
    FIELD(int, ecc_enabled, CU_DEVICE_ATTRIBUTE_ECC_ENABLED)                                                                \
    FIELD(int, pci_bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)                                                                     \
    FIELD(int, pci_device, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)                                                               \
    FIELD(int, pci_domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)                                                               \
    FIELD(int, tcc_driver, CU_DEVICE_ATTRIBUTE_TCC_DRIVER)                                                                  \
    FIELD(int, copy_engines, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)                                                        \
    FIELD(int, unified_addressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)                                                  \
    OLD_FIELD(int, memory_clock_rate, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)                                                \
    FIELD(int, memory_bus_width, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)                                               \
    FIELD(int, l2_bytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)                                                                 \
    FIELD(int, persisting_l2_bytes, CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE)                                       \
    FIELD(int, threads_per_multiprocessor, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)                              \
    FIELD(int, stream_priorities, CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED)                                          \
    FIELD(int, global_l1, CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED)                                                    \
    FIELD(int, local_l1, CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED)                                                      \
    FIELD(size_t, shared_per_multiprocessor, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)                      \
    FIELD(int, registers_per_multiprocessor, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)                          \
    FIELD(int, managed_memory, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY)                                                          \
    FIELD(int, multi_gpu_board, CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD)                                                        \
    FIELD(int, multi_gpu_board_group, CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID)                                         \
    FIELD(int, host_native_atomics, CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED)                                       \
    OLD_FIELD(int, single_to_double_ratio, CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO)                       \
    FIELD(int, pageable_access, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)                                                 \
    FIELD(int, concurrent_managed_access, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)                                    \
    FIELD(int, compute_preemption, CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED)                                        \
    FIELD(int, host_pointer_of_registered, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)                     \
    FIELD(int, cooperative_launch, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)                                                  \
    OLD_FIELD(int, cooperative_multi_device_launch, 0)                                                                      \
    FIELD(size_t, shared_per_block_optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)                            \
    FIELD(int, pageable_by_host_tables, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)                   \
    FIELD(int, managed_from_host, CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST)                                  \
    FIELD(int, blocks_per_multiprocessor, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)                                \
    FIELD(int, access_policy_window, CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE)                                     \
    FIELD(size_t, reserved_shared_per_block, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK)                          \
    FIELD(int, host_register, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)                                                  \
    FIELD(int, sparse_arrays, CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED)                                              \
    FIELD(int, host_register_read_only, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)                              \
    FIELD(int, timeline_semaphores, CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED)                               \
    FIELD(int, memory_pools, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)                                                    \
    FIELD(int, rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)                                                         \
    FIELD(unsigned int, rdma_flush, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)                               \
    FIELD(int, rdma_ordering, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)                                          \
    FIELD(unsigned int, pool_handle_types, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)                              \
    FIELD(int, deferred_mapping, CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED)                                 \
    FIELD(int, ipc_events, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED)                                                         \
    FIELD(int, cluster_launch, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)                                                          \
    FIELD(int, unified_functions, CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS)                                            \
    OLD_ARRAY(int, reserved, 63)                                                                                            \
    NEW_ARRAY(int, numa_and_mps, 7)                                                                                         \
    NEW_ARRAY(int, reserved, 56)

#define SIM_PROPERTY_FIELD(type, name, attribute) type name;
#define SIM_PROPERTY_ARRAY(type, name, count)     type name[count];
#define SIM_PROPERTY_NO_FIELD(type, name, attribute)
#define SIM_PROPERTY_NO_ARRAY(type, name, count)

/* cudaDeviceProp of CUDA 12 (cudaGetDeviceProperties_v2) and of CUDA 13 (cudaGetDeviceProperties). */
typedef struct sim_properties_12 {
    SIM_PROPERTY_FIELDS(SIM_PROPERTY_FIELD, SIM_PROPERTY_ARRAY, SIM_PROPERTY_FIELD, SIM_PROPERTY_ARRAY,
                        SIM_PROPERTY_NO_FIELD, SIM_PROPERTY_NO_ARRAY)
} sim_properties_12_t;

typedef struct sim_properties_13 {
    SIM_PROPERTY_FIELDS(SIM_PROPERTY_FIELD, SIM_PROPERTY_ARRAY, SIM_PROPERTY_NO_FIELD, SIM_PROPERTY_NO_ARRAY,
                        SIM_PROPERTY_FIELD, SIM_PROPERTY_ARRAY)
} sim_properties_13_t;

_Static_assert(sizeof(sim_properties_12_t) == 1032, "cudaDeviceProp of CUDA 12");
_Static_assert(sizeof(sim_properties_13_t) == 1008, "cudaDeviceProp of CUDA 13");
_Static_assert(offsetof(sim_properties_13_t, surface_alignment) == 552, "cudaDeviceProp of CUDA 13");
_Static_assert(offsetof(sim_properties_13_t, ipc_events) == 744, "cudaDeviceProp of CUDA 13");

#endif
