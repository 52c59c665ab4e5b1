/* Random numbers: a hash of the generator's state and the element index. The same seed gives the same numbers; an
 * advanced generator gives others. */
#include "simulator/kernels/kernel.h"
#include "simulator/memory/touch.h"

enum { NORMAL_TERMS = 12, FRACTION_BITS = 53 };

/* Every bit of the result depends on every bit of the input. The constants are those of the splitmix64 generator. */
static uint64_t mix(uint64_t number) {
    number += 0x9E3779B97F4A7C15U;
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9U;
    number = (number ^ (number >> 27)) * 0x94D049BB133111EBU;
    return number ^ (number >> 31);
}

uint64_t sim_random_seed(uint64_t seed, uint64_t offset) {
    static const uint64_t factor = 0x9E3779B97F4A7C15U; /* distributes small seeds over the range */
    return seed * factor + offset;
}

bool sim_random_read(const sim_context_t *context, tms_sim_draw_t *draw) {
    uint64_t seed = 0, offset = 0;
    if (!draw->seed_address) return true;
    if (!sim_memory_read_word(context, draw->seed_address, &seed)) return false;
    if (!sim_memory_read_word(context, draw->offset_address, &offset)) return false;
    *draw = (tms_sim_draw_t){.seed = sim_random_seed(seed, offset + draw->seed)};
    return true;
}

uint64_t sim_random_number(const tms_sim_draw_t *draw) { return mix(mix(draw->seed)) & INT64_MAX; }

/* Mask of the bits that a type represents exactly in non-negative numbers. */
static uint64_t mask_of(sim_type_t type) {
    switch (type) {
    case SIM_TYPE_BOOL: return 1;
    case SIM_TYPE_UINT8: return UINT8_MAX;
    case SIM_TYPE_INT8: return INT8_MAX;
    case SIM_TYPE_INT16: return INT16_MAX;
    case SIM_TYPE_INT32: return INT32_MAX;
    case SIM_TYPE_BFLOAT16: return ((uint64_t)1 << 8) - 1;
    case SIM_TYPE_HALF: return ((uint64_t)1 << 11) - 1;
    case SIM_TYPE_FLOAT: return ((uint64_t)1 << 24) - 1;
    case SIM_TYPE_DOUBLE: return ((uint64_t)1 << FRACTION_BITS) - 1;
    default: return INT64_MAX;
    }
}

static double unit(uint64_t bits) { return (double)(bits >> (64 - FRACTION_BITS)) * 0x1p-53; }

/* Below 1, also after rounding to the type. */
static double unit_of(sim_type_t type, uint64_t bits) {
    uint64_t mask = mask_of(type);
    return (double)(bits & mask) / ((double)mask + 1);
}

/* Approximately normal: the sum of twelve uniform numbers has variance 1. */
static double normal(uint64_t bits) {
    double sum = -NORMAL_TERMS / 2.0;
    for (int i = 0; i < NORMAL_TERMS; i++) {
        bits = mix(bits);
        sum += unit(bits);
    }
    return sum;
}

void sim_random_numbers(const sim_kernel_t *kernel, uint64_t first, size_t count, sim_number_t *numbers) {
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = mix(mix(kernel->draw.seed) + first + i);
        switch (kernel->name.operation) {
        case SIM_NORMAL: numbers[i].real = kernel->constant.real + kernel->factor.real * normal(bits); break;
        case SIM_UNIFORM:
            numbers[i].real = kernel->constant.real + kernel->factor.real * unit_of(kernel->name.output, bits);
            break;
        case SIM_RANDOM_FROM:
            numbers[i].integer = (int64_t)((uint64_t)kernel->constant.integer + bits % (uint64_t)kernel->factor.integer);
            break;
        default: numbers[i].integer = (int64_t)(bits & mask_of(kernel->name.output)); break;
        }
    }
}
