/* Entry points of NCCL, in the format of base/entry_list.h. They return NCCL results; a failed check gives
 * ncclUnhandledCudaError. Implemented in lifetime.c, group.c, operation_calls.c and memory.c. ncclGetErrorString and
 * ncclGetLastError return texts and are in control/nccl_calls.c. */
#ifndef TMS_SIM_NCCL_ENTRIES_H
#define TMS_SIM_NCCL_ENTRIES_H

#include "simulator/base/entry_list.h"
#include "simulator/nccl/types.h"

#define SIM_NCCL_ENTRIES(X)                                                                                                 \
    X(ncclGetVersion, sim_nccl_get_version, SIM_PURE, (int *version), (version))                                            \
    X(ncclGetUniqueId, sim_nccl_get_unique_id, SIM_PURE, (sim_nccl_id_t * id), (id))                                        \
    X(ncclCommInitRank, sim_nccl_init_rank, SIM_RUNTIME, (sim_nccl_handle_t * comm, int ranks, sim_nccl_id_t id, int rank), \
      (comm, ranks, id, rank))                                                                                              \
    X(ncclCommInitRankConfig, sim_nccl_init_rank_config, SIM_RUNTIME,                                                       \
      (sim_nccl_handle_t * comm, int ranks, sim_nccl_id_t id, int rank, const sim_nccl_config_t *config),                   \
      (comm, ranks, id, rank, config))                                                                                      \
    X(ncclCommInitRankScalable, sim_nccl_init_rank_scalable, SIM_RUNTIME,                                                   \
      (sim_nccl_handle_t * comm, int ranks, int rank, int count, const sim_nccl_id_t *ids,                                  \
       const sim_nccl_config_t *config),                                                                                    \
      (comm, ranks, rank, count, ids, config))                                                                              \
    X(ncclCommInitAll, sim_nccl_init_all, SIM_DEVICES, (sim_nccl_handle_t * comms, int count, const int *devices),          \
      (comms, count, devices))                                                                                              \
    X(ncclCommSplit, sim_nccl_split, 0,                                                                                     \
      (sim_nccl_handle_t comm, int color, int key, sim_nccl_handle_t *made, const sim_nccl_config_t *config),               \
      (comm, color, key, made, config))                                                                                     \
    X(ncclCommShrink, sim_nccl_shrink, 0,                                                                                   \
      (sim_nccl_handle_t comm, const int *ranks, int count, sim_nccl_handle_t *made, const sim_nccl_config_t *config,       \
       int flags),                                                                                                          \
      (comm, ranks, count, made, config, flags))                                                                            \
    X(ncclCommFinalize, sim_nccl_finalize, 0, (sim_nccl_handle_t comm), (comm))                                             \
    X(ncclCommDestroy, sim_nccl_destroy, 0, (sim_nccl_handle_t comm), (comm))                                               \
    X(ncclCommAbort, sim_nccl_abort, 0, (sim_nccl_handle_t comm), (comm))                                                   \
    X(ncclCommGetAsyncError, sim_nccl_async_error, 0, (sim_nccl_handle_t comm, sim_nccl_result_t * error), (comm, error))   \
    X(ncclCommCount, sim_nccl_count, 0, (sim_nccl_handle_t comm, int *count), (comm, count))                                \
    X(ncclCommCuDevice, sim_nccl_device, 0, (sim_nccl_handle_t comm, int *device), (comm, device))                          \
    X(ncclCommUserRank, sim_nccl_rank, 0, (sim_nccl_handle_t comm, int *rank), (comm, rank))                                \
    X(ncclGroupStart, sim_nccl_group_start, SIM_PURE, (void), ())                                                           \
    X(ncclGroupEnd, sim_nccl_group_end, 0, (void), ())                                                                      \
    X(ncclGroupSimulateEnd, sim_nccl_group_simulate_end, 0, (void *information), (information))                             \
    X(ncclAllReduce, sim_nccl_all_reduce, 0,                                                                                \
      (const void *source, void *destination, size_t count, int type, int reduction, sim_nccl_handle_t comm,                \
       CUstream stream),                                                                                                    \
      (source, destination, count, type, reduction, comm, stream))                                                          \
    X(ncclBroadcast, sim_nccl_broadcast, 0,                                                                                 \
      (const void *source, void *destination, size_t count, int type, int root, sim_nccl_handle_t comm, CUstream stream),   \
      (source, destination, count, type, root, comm, stream))                                                               \
    X(ncclBcast, sim_nccl_broadcast_in_place, 0,                                                                            \
      (void *buffer, size_t count, int type, int root, sim_nccl_handle_t comm, CUstream stream),                            \
      (buffer, count, type, root, comm, stream))                                                                            \
    X(ncclReduce, sim_nccl_reduce_to, 0,                                                                                    \
      (const void *source, void *destination, size_t count, int type, int reduction, int root, sim_nccl_handle_t comm,      \
       CUstream stream),                                                                                                    \
      (source, destination, count, type, reduction, root, comm, stream))                                                    \
    X(ncclAllGather, sim_nccl_all_gather, 0,                                                                                \
      (const void *source, void *destination, size_t count, int type, sim_nccl_handle_t comm, CUstream stream),             \
      (source, destination, count, type, comm, stream))                                                                     \
    X(ncclReduceScatter, sim_nccl_reduce_scatter, 0,                                                                        \
      (const void *source, void *destination, size_t count, int type, int reduction, sim_nccl_handle_t comm,                \
       CUstream stream),                                                                                                    \
      (source, destination, count, type, reduction, comm, stream))                                                          \
    X(ncclAlltoAll, sim_nccl_all_to_all, 0,                                                                                 \
      (const void *source, void *destination, size_t count, int type, sim_nccl_handle_t comm, CUstream stream),             \
      (source, destination, count, type, comm, stream))                                                                     \
    X(ncclGather, sim_nccl_gather, 0,                                                                                       \
      (const void *source, void *destination, size_t count, int type, int root, sim_nccl_handle_t comm, CUstream stream),   \
      (source, destination, count, type, root, comm, stream))                                                               \
    X(ncclScatter, sim_nccl_scatter, 0,                                                                                     \
      (const void *source, void *destination, size_t count, int type, int root, sim_nccl_handle_t comm, CUstream stream),   \
      (source, destination, count, type, root, comm, stream))                                                               \
    X(ncclSend, sim_nccl_send, 0,                                                                                           \
      (const void *source, size_t count, int type, int peer, sim_nccl_handle_t comm, CUstream stream),                      \
      (source, count, type, peer, comm, stream))                                                                            \
    X(ncclRecv, sim_nccl_receive, 0,                                                                                        \
      (void *destination, size_t count, int type, int peer, sim_nccl_handle_t comm, CUstream stream),                       \
      (destination, count, type, peer, comm, stream))                                                                       \
    X(ncclRedOpCreatePreMulSum, sim_nccl_make_reduction, 0,                                                                 \
      (int *reduction, void *scalar, int type, int residence, sim_nccl_handle_t comm),                                      \
      (reduction, scalar, type, residence, comm))                                                                           \
    X(ncclRedOpDestroy, sim_nccl_drop_reduction, 0, (int reduction, sim_nccl_handle_t comm), (reduction, comm))             \
    X(ncclMemAlloc, sim_nccl_mem_alloc, SIM_RUNTIME, (void **address, size_t bytes), (address, bytes))                      \
    X(ncclMemFree, sim_nccl_mem_free, SIM_RUNTIME, (void *address), (address))                                              \
    X(ncclCommRegister, sim_nccl_register, 0, (sim_nccl_handle_t comm, void *buffer, size_t bytes, void **registration),    \
      (comm, buffer, bytes, registration))                                                                                  \
    X(ncclCommDeregister, sim_nccl_deregister, 0, (sim_nccl_handle_t comm, void *registration), (comm, registration))       \
    X(ncclCommSuspend, sim_nccl_suspend, 0, (sim_nccl_handle_t comm, int flags), (comm, flags))                             \
    X(ncclCommResume, sim_nccl_resume, 0, (sim_nccl_handle_t comm), (comm))                                                 \
    X(ncclCommMemStats, sim_nccl_statistics, 0, (sim_nccl_handle_t comm, int which, uint64_t *value), (comm, which, value)) \
    X(ncclCommWindowRegister, sim_nccl_window_register, 0,                                                                  \
      (sim_nccl_handle_t comm, void *buffer, size_t bytes, void **window, int flags), (comm, buffer, bytes, window, flags)) \
    X(ncclCommWindowDeregister, sim_nccl_window_deregister, 0, (sim_nccl_handle_t comm, void *window), (comm, window))      \
    X(ncclDevCommCreate, sim_nccl_dev_comm_create, 0, (sim_nccl_handle_t comm, const void *requirements, void *made),       \
      (comm, requirements, made))                                                                                           \
    X(ncclDevCommDestroy, sim_nccl_dev_comm_destroy, 0, (sim_nccl_handle_t comm, const void *made), (comm, made))

#define SIM_NCCL_DECLARE(symbol, implementation, checks, parameters, arguments) sim_nccl_result_t implementation parameters;
SIM_NCCL_ENTRIES(SIM_NCCL_DECLARE)
#undef SIM_NCCL_DECLARE

#endif
