/* NCCL's number types and their reductions. Owns nothing and needs no lock. */
#ifndef TMS_SIM_NCCL_NUMBERS_H
#define TMS_SIM_NCCL_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/nccl/types.h"

size_t sim_nccl_type_bytes(sim_nccl_type_t type);
const char *sim_nccl_type_name(sim_nccl_type_t type);
/* Reduces `count` elements of each source, in source order, which is the same on every rank. Types narrower than float are
 * computed in float and rounded once. Integers wrap around, even in the sum of an average. The destination may be one of the
 * sources. */
void sim_nccl_reduce(sim_nccl_type_t type, sim_nccl_reduction_t reduction, void *destination, const void *const *sources,
                     unsigned source_count, size_t count);
/* Multiplies elements by a factor of their type. */
void sim_nccl_scale(sim_nccl_type_t type, void *elements, size_t count, const void *factor);

#endif
