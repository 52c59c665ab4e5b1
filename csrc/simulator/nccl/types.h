/* The binary interface of NCCL: types that programs pass and receive, from its public documentation. Owns nothing. */
#ifndef TMS_SIM_NCCL_TYPES_H
#define TMS_SIM_NCCL_TYPES_H

#include <cuda.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SIM_NCCL_VERSION = 22907, /* 2.29.7: the first with ncclCommSuspend */
    SIM_NCCL_ID_BYTES = 128,
    SIM_NCCL_UNDEFINED = INT_MIN, /* a setting that the program leaves to NCCL */
    SIM_NCCL_NO_COLOR = -1,
    SIM_NCCL_SHRINK_ABORT = 1,
    SIM_NCCL_SUSPEND_MEMORY = 1,
    SIM_NCCL_SCALAR_ON_DEVICE = 0, /* location of a reduction's factor, and when it is read: by the operation */
    SIM_NCCL_SCALAR_ON_HOST = 1,   /* immediately */
};
static const uint32_t sim_nccl_config_magic = 0xcafebeef;

typedef enum sim_nccl_result {
    SIM_NCCL_SUCCESS,
    SIM_NCCL_UNHANDLED_CUDA,
    SIM_NCCL_SYSTEM,
    SIM_NCCL_INTERNAL,
    SIM_NCCL_INVALID_ARGUMENT,
    SIM_NCCL_INVALID_USAGE,
    SIM_NCCL_REMOTE,
    SIM_NCCL_IN_PROGRESS,
    SIM_NCCL_RESULTS,
} sim_nccl_result_t;

typedef enum sim_nccl_type {
    SIM_NCCL_INT8,
    SIM_NCCL_UINT8,
    SIM_NCCL_INT32,
    SIM_NCCL_UINT32,
    SIM_NCCL_INT64,
    SIM_NCCL_UINT64,
    SIM_NCCL_HALF,
    SIM_NCCL_FLOAT,
    SIM_NCCL_DOUBLE,
    SIM_NCCL_BFLOAT16,
    SIM_NCCL_FLOAT8_E4M3,
    SIM_NCCL_FLOAT8_E5M2,
    SIM_NCCL_TYPES,
} sim_nccl_type_t;

typedef enum sim_nccl_reduction {
    SIM_NCCL_SUM,
    SIM_NCCL_PRODUCT,
    SIM_NCCL_MAXIMUM,
    SIM_NCCL_MINIMUM,
    SIM_NCCL_AVERAGE,
    SIM_NCCL_REDUCTIONS, /* numbers from here on: reductions that the program creates */
} sim_nccl_reduction_t;

/* The statistics of ncclCommMemStats. */
typedef enum sim_nccl_statistic {
    SIM_NCCL_CAN_SUSPEND,
    SIM_NCCL_IS_SUSPENDED,
    SIM_NCCL_STAYS,
    SIM_NCCL_TOTAL,
} sim_nccl_statistic_t;

typedef struct sim_nccl_id {
    char bytes[SIM_NCCL_ID_BYTES];
} sim_nccl_id_t;

/* The used part of ncclConfig_t. Later versions append fields and increase `size`. */
typedef struct sim_nccl_config {
    size_t size;
    uint32_t magic;
    uint32_t version;
    int blocking;
} sim_nccl_config_t;

typedef struct sim_nccl_opaque *sim_nccl_handle_t; /* ncclComm_t: an identifier that is never reused */

#endif
