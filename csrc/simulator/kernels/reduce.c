/* Reductions of a sequence of numbers to one number. Sums are computed sequentially in double. A device adds in the
 * computing type and in its own order. */
#include <math.h>

#include "simulator/kernels/kernel.h"

static double first_real(sim_operation_t operation) {
    switch (operation) {
    case SIM_AND: return 1;
    case SIM_MAXIMUM: return (double)-INFINITY;
    case SIM_MINIMUM: return (double)INFINITY;
    default: return 0;
    }
}

static int64_t first_integer(sim_operation_t operation) {
    switch (operation) {
    case SIM_AND: return 1;
    case SIM_MAXIMUM: return INT64_MIN;
    case SIM_MINIMUM: return INT64_MAX;
    default: return 0;
    }
}

sim_number_t sim_operation_start(const sim_kernel_t *kernel) {
    sim_number_t start;
    if (sim_type_is_real(kernel->name.compute))
        start.real = first_real(kernel->name.operation);
    else
        start.integer = first_integer(kernel->name.operation);
    return start;
}

static double combine_reals(sim_operation_t operation, double total, double number) {
    switch (operation) {
    case SIM_AND: return total != 0 && number != 0;
    case SIM_OR: return total != 0 || number != 0;
    case SIM_MAXIMUM: return isnan(total) || total > number ? total : number;
    case SIM_MINIMUM: return isnan(total) || total < number ? total : number;
    default: return total + number;
    }
}

static int64_t combine_integers(sim_operation_t operation, int64_t total, int64_t number) {
    switch (operation) {
    case SIM_AND: return total && number;
    case SIM_OR: return total || number;
    case SIM_MAXIMUM: return total > number ? total : number;
    case SIM_MINIMUM: return total < number ? total : number;
    default: return (int64_t)((uint64_t)total + (uint64_t)number);
    }
}

sim_number_t sim_operation_combine(const sim_kernel_t *kernel, sim_number_t total, const sim_number_t *numbers,
                                   size_t count) {
    sim_operation_t operation = kernel->name.operation;
    bool real = sim_type_is_real(kernel->name.compute);
    for (size_t i = 0; i < count; i++) {
        if (real)
            total.real = combine_reals(operation, total.real, numbers[i].real);
        else
            total.integer = combine_integers(operation, total.integer, numbers[i].integer);
    }
    return total;
}
