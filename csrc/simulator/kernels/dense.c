/* The most frequent kernels, over dense memory of one type: a loop over the elements in place. Their results equal those
 * of kernels/elementwise.c and kernels/reduce.c, number by number. */
#include <math.h>
#include <string.h>

#include "simulator/kernels/kernel.h"

enum { PATTERN_BYTES = 1 << 16 }; /* fits in the cache */

static bool is_computed(sim_type_t type) {
    return type == SIM_TYPE_UINT8 || type == SIM_TYPE_INT32 || type == SIM_TYPE_INT64 || type == SIM_TYPE_FLOAT ||
           type == SIM_TYPE_DOUBLE;
}

/* Whether all inputs have one type, which is also the computing type. */
static bool reads_one_type(const sim_kernel_t *kernel, sim_type_t type) {
    if (kernel->name.input != type || kernel->name.compute != type) return false;
    for (unsigned i = 1; i <= kernel->name.inputs; i++) {
        if (kernel->operands[i].type != type || kernel->operands[i].address % sim_type_bytes(type)) return false;
    }
    return true;
}

static bool writes(const sim_kernel_t *kernel, sim_type_t type) {
    return kernel->name.output == type && kernel->operands[0].type == type &&
           kernel->operands[0].address % sim_type_bytes(type) == 0;
}

bool sim_dense_applies(const sim_kernel_t *kernel) {
    sim_type_t type = kernel->name.compute;
    for (unsigned i = 0; i <= kernel->name.inputs; i++) {
        if (!kernel->operands[i].dense) return false;
    }
    switch (kernel->name.operation) {
    case SIM_FILL: return true;
    case SIM_COPY: return type != SIM_TYPE_BOOL && reads_one_type(kernel, type) && writes(kernel, type);
    case SIM_ADD:
    case SIM_MULTIPLY: return is_computed(type) && reads_one_type(kernel, type) && writes(kernel, type);
    case SIM_COMPARE: return is_computed(type) && reads_one_type(kernel, type) && writes(kernel, SIM_TYPE_BOOL);
    default: return false;
    }
}

/* An operand's elements from `first` on, or the batch of constants. */
static const void *elements_of(const sim_kernel_t *kernel, sim_constant_t position, uint64_t first, const void *constants) {
    if (kernel->name.constant == position) return constants;
    unsigned operand = position == SIM_CONSTANT_SECOND && kernel->name.constant != SIM_CONSTANT_FIRST ? 2 : 1;
    uint64_t bytes = sim_type_bytes(kernel->name.input);
    return (const void *)(uintptr_t)(kernel->operands[operand].address + first * bytes);
}

/* Computes a batch. Integers are computed as unsigned, so they wrap around. */
#define COMPUTE(function, c_type, wide, field)                                                                              \
    static void function(const sim_kernel_t *kernel, uint64_t first, size_t count) {                                        \
        c_type constants[SIM_KERNEL_BATCH];                                                                                 \
        if (kernel->name.constant != SIM_CONSTANT_NONE) {                                                                   \
            for (size_t i = 0; i < count; i++) constants[i] = (c_type)kernel->constant.field;                               \
        }                                                                                                                   \
        const c_type *a = elements_of(kernel, SIM_CONSTANT_FIRST, first, constants);                                        \
        const c_type *b = elements_of(kernel, SIM_CONSTANT_SECOND, first, constants);                                       \
        c_type *numbers = (c_type *)(uintptr_t)kernel->operands[0].address + first;                                         \
        uint8_t *truths = (uint8_t *)(uintptr_t)kernel->operands[0].address + first;                                        \
        wide factor = (wide)kernel->factor.field;                                                                           \
        bool negated = kernel->negated;                                                                                     \
        if (kernel->name.operation == SIM_COMPARE) {                                                                        \
            for (size_t i = 0; i < count; i++) truths[i] = (a[i] == b[i]) != negated;                                       \
        } else if (kernel->name.operation == SIM_MULTIPLY) {                                                                \
            for (size_t i = 0; i < count; i++) numbers[i] = (c_type)((wide)a[i] * (wide)b[i]);                              \
        } else {                                                                                                            \
            for (size_t i = 0; i < count; i++) numbers[i] = (c_type)((wide)a[i] + factor * (wide)b[i]);                     \
        }                                                                                                                   \
    }

COMPUTE(compute_uint8, uint8_t, uint64_t, integer)
COMPUTE(compute_int32, int32_t, uint64_t, integer)
COMPUTE(compute_int64, int64_t, uint64_t, integer)
COMPUTE(compute_float, float, double, real)
COMPUTE(compute_double, double, double, real)

static void compute_batch(const sim_kernel_t *kernel, uint64_t first, size_t count) {
    switch (kernel->name.compute) {
    case SIM_TYPE_UINT8: compute_uint8(kernel, first, count); break;
    case SIM_TYPE_INT32: compute_int32(kernel, first, count); break;
    case SIM_TYPE_INT64: compute_int64(kernel, first, count); break;
    case SIM_TYPE_FLOAT: compute_float(kernel, first, count); break;
    default: compute_double(kernel, first, count); break;
    }
}

/* Repeats the bytes of one element of any type. */
static void fill(const sim_kernel_t *kernel, uint64_t first, uint64_t count) {
    size_t bytes = sim_type_bytes(kernel->operands[0].type), done = bytes, total = count * bytes;
    uint64_t address = kernel->operands[0].address + first * bytes;
    uint8_t *destination = (uint8_t *)(uintptr_t)address;
    sim_number_t number = kernel->constant;
    sim_type_convert(kernel->name.compute, kernel->name.output, 1, &number);
    sim_type_convert(kernel->name.output, kernel->operands[0].type, 1, &number);
    sim_type_store(kernel->operands[0].type, &address, 1, &number);
    if (bytes == 1) {
        memset(destination, destination[0], total);
        return;
    }
    while (done < total) {
        size_t part = done < PATTERN_BYTES ? done : PATTERN_BYTES;
        if (part > total - done) part = total - done;
        memcpy(destination + done, destination, part);
        done += part;
    }
}

void sim_dense_compute(const sim_kernel_t *kernel, uint64_t first, uint64_t count) {
    uint64_t bytes = sim_type_bytes(kernel->operands[0].type);
    if (kernel->name.operation == SIM_FILL) {
        fill(kernel, first, count);
    } else if (kernel->name.operation == SIM_COPY) {
        memmove((void *)(uintptr_t)(kernel->operands[0].address + first * bytes),
                (const void *)(uintptr_t)(kernel->operands[1].address + first * bytes), count * bytes);
    } else {
        for (uint64_t done = 0; done < count; done += SIM_KERNEL_BATCH)
            compute_batch(kernel, first + done, count - done < SIM_KERNEL_BATCH ? count - done : SIM_KERNEL_BATCH);
    }
}

static bool is_logical(sim_operation_t operation) { return operation == SIM_AND || operation == SIM_OR; }

bool sim_dense_reduces(const sim_kernel_t *kernel, uint64_t address) {
    sim_type_t type = kernel->operands[1].type, compute = kernel->name.compute;
    if (!kernel->operands[1].dense || kernel->name.input != type || address % sim_type_bytes(type)) return false;
    if (type == SIM_TYPE_BOOL) return compute == type && is_logical(kernel->name.operation);
    if (!is_computed(type)) return false;
    return compute == type || compute == (sim_type_is_real(type) ? SIM_TYPE_DOUBLE : SIM_TYPE_INT64);
}

#define EACH(expression)                                                                                                    \
    for (size_t i = 0; i < count; i++) sum = (expression);                                                                  \
    break;

/* Reduces elements into the total. Integers are summed as unsigned, so they wrap around. */
#define REDUCE_INTEGERS(code, c_type)                                                                                       \
    case code: {                                                                                                            \
        const c_type *elements = (const c_type *)(uintptr_t)address;                                                        \
        int64_t sum = total.integer;                                                                                        \
        switch (operation) {                                                                                                \
        case SIM_AND: EACH((sum != 0) & (elements[i] != 0))                                                                 \
        case SIM_OR: EACH((sum != 0) | (elements[i] != 0))                                                                  \
        case SIM_MAXIMUM: EACH(sum > elements[i] ? sum : elements[i])                                                       \
        case SIM_MINIMUM: EACH(sum < elements[i] ? sum : elements[i])                                                       \
        default: EACH((int64_t)((uint64_t)sum + (uint64_t)elements[i]))                                                     \
        }                                                                                                                   \
        total.integer = sum;                                                                                                \
        break;                                                                                                              \
    }

#define REDUCE_REALS(code, c_type)                                                                                          \
    case code: {                                                                                                            \
        const c_type *elements = (const c_type *)(uintptr_t)address;                                                        \
        double sum = total.real;                                                                                            \
        switch (operation) {                                                                                                \
        case SIM_AND: EACH((sum != 0) & (elements[i] != 0))                                                                 \
        case SIM_OR: EACH((sum != 0) | (elements[i] != 0))                                                                  \
        case SIM_MAXIMUM: EACH(isnan(sum) || sum > (double)elements[i] ? sum : (double)elements[i])                         \
        case SIM_MINIMUM: EACH(isnan(sum) || sum < (double)elements[i] ? sum : (double)elements[i])                         \
        default: EACH(sum + (double)elements[i])                                                                            \
        }                                                                                                                   \
        total.real = sum;                                                                                                   \
        break;                                                                                                              \
    }

sim_number_t sim_dense_reduce(const sim_kernel_t *kernel, sim_number_t total, uint64_t address, size_t count) {
    sim_operation_t operation = kernel->name.operation;
    switch (kernel->operands[1].type) {
        REDUCE_INTEGERS(SIM_TYPE_UINT8, uint8_t)
        REDUCE_INTEGERS(SIM_TYPE_INT32, int32_t)
        REDUCE_INTEGERS(SIM_TYPE_INT64, int64_t)
        REDUCE_REALS(SIM_TYPE_FLOAT, float)
        REDUCE_REALS(SIM_TYPE_DOUBLE, double)
        REDUCE_INTEGERS(SIM_TYPE_BOOL, uint8_t) /* any nonzero byte is true */
    default: break;
    }
    return total;
}
