#include "simulator/nccl/numbers.h"

#include <math.h>
#include <string.h>

enum { BATCH = 256 };

typedef union batch {
    float floats[BATCH];
    double doubles[BATCH];
    uint64_t integers[BATCH]; /* of a signed type: the bits of its value as a 64-bit number */
} batch_t;

static const struct {
    const char *name;
    uint8_t bytes;
} types[SIM_NCCL_TYPES] = {
    [SIM_NCCL_INT8] = {"int8", 1},
    [SIM_NCCL_UINT8] = {"uint8", 1},
    [SIM_NCCL_INT32] = {"int32", 4},
    [SIM_NCCL_UINT32] = {"uint32", 4},
    [SIM_NCCL_INT64] = {"int64", 8},
    [SIM_NCCL_UINT64] = {"uint64", 8},
    [SIM_NCCL_HALF] = {"float16", 2},
    [SIM_NCCL_FLOAT] = {"float32", 4},
    [SIM_NCCL_DOUBLE] = {"float64", 8},
    [SIM_NCCL_BFLOAT16] = {"bfloat16", 2},
    [SIM_NCCL_FLOAT8_E4M3] = {"float8e4m3", 1},
    [SIM_NCCL_FLOAT8_E5M2] = {"float8e5m2", 1},
};

size_t sim_nccl_type_bytes(sim_nccl_type_t type) { return types[type].bytes; }

const char *sim_nccl_type_name(sim_nccl_type_t type) { return types[type].name; }

/* A binary floating-point format narrower than float. */
typedef struct format {
    int exponent_bits, fraction_bits;
    bool has_infinity; /* false: only the all-ones pattern is NaN */
} format_t;

static const format_t half_format = {5, 10, true}, bfloat16_format = {8, 7, true}, e4m3_format = {4, 3, false},
                      e5m2_format = {5, 2, true};

static float widen(const format_t *format, unsigned bits) {
    int fraction_count = 1 << format->fraction_bits, top = (1 << format->exponent_bits) - 1;
    int fraction = (int)(bits & (unsigned)(fraction_count - 1));
    int exponent = (int)(bits >> format->fraction_bits) & top, bias = top / 2;
    float value = 0;
    if (exponent == top && (format->has_infinity || fraction == fraction_count - 1))
        value = fraction ? NAN : INFINITY;
    else if (exponent)
        value = ldexpf((float)(fraction_count + fraction), exponent - bias - format->fraction_bits);
    else
        value = ldexpf((float)fraction, 1 - bias - format->fraction_bits);
    return bits >> (format->exponent_bits + format->fraction_bits) & 1 ? -value : value;
}

/* Rounds to nearest, ties to even. Overflow gives infinity, or the largest number if the format has no infinity. */
static unsigned narrow(const format_t *format, float number) {
    int top = (1 << format->exponent_bits) - 1, bias = top / 2, exponent = 0;
    unsigned sign = (unsigned)(signbit(number) != 0) << (format->exponent_bits + format->fraction_bits);
    unsigned infinity = (unsigned)top << format->fraction_bits, all = infinity | ((1U << format->fraction_bits) - 1);
    double value = fabs((double)number);
    if (isnan(number)) return sign | (format->has_infinity ? infinity | 1U << (format->fraction_bits - 1) : all);
    if (isinf(value)) return sign | (format->has_infinity ? infinity : all - 1);
    if (value == 0) return sign;
    frexp(value, &exponent); /* value = [0.5, 1) * 2^exponent */
    int lowest = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
    /* In units of the last place. Adding a number that leaves no fraction bits rounds. A carry into the exponent is
     * correct without special handling. */
    double units = ldexp(value, format->fraction_bits - lowest) + 0x1p52 - 0x1p52;
    double bits = units + (double)((lowest + bias - 1) << format->fraction_bits);
    unsigned largest = format->has_infinity ? infinity : all - 1;
    return sign | (bits >= largest ? largest : (unsigned)bits);
}

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define LOAD(code, c_type, field, expression)                                                                               \
    case code:                                                                                                              \
        for (size_t i = 0; i < count; i++) {                                                                                \
            c_type value;                                                                                                   \
            memcpy(&value, (const char *)source + i * sizeof value, sizeof value);                                          \
            batch->field[i] = (expression);                                                                                 \
        }                                                                                                                   \
        break;

static void load(sim_nccl_type_t type, const void *source, size_t count, batch_t *batch) {
    switch (type) {
        LOAD(SIM_NCCL_INT8, int8_t, integers, (uint64_t)(int64_t)value)
        LOAD(SIM_NCCL_UINT8, uint8_t, integers, value)
        LOAD(SIM_NCCL_INT32, int32_t, integers, (uint64_t)(int64_t)value)
        LOAD(SIM_NCCL_UINT32, uint32_t, integers, value)
        LOAD(SIM_NCCL_INT64, uint64_t, integers, value)
        LOAD(SIM_NCCL_UINT64, uint64_t, integers, value)
        LOAD(SIM_NCCL_HALF, uint16_t, floats, widen(&half_format, value))
        LOAD(SIM_NCCL_FLOAT, float, floats, value)
        LOAD(SIM_NCCL_DOUBLE, double, doubles, value)
        LOAD(SIM_NCCL_BFLOAT16, uint16_t, floats, float_of_bits((uint32_t)value << 16))
        LOAD(SIM_NCCL_FLOAT8_E4M3, uint8_t, floats, widen(&e4m3_format, value))
        LOAD(SIM_NCCL_FLOAT8_E5M2, uint8_t, floats, widen(&e5m2_format, value))
    case SIM_NCCL_TYPES: break;
    }
}

#define STORE(code, c_type, expression)                                                                                     \
    case code:                                                                                                              \
        for (size_t i = 0; i < count; i++) {                                                                                \
            c_type value = (c_type)(expression);                                                                            \
            memcpy((char *)destination + i * sizeof value, &value, sizeof value);                                           \
        }                                                                                                                   \
        break;

static void store(sim_nccl_type_t type, void *destination, size_t count, const batch_t *batch) {
    switch (type) {
        STORE(SIM_NCCL_INT8, uint8_t, batch->integers[i])
        STORE(SIM_NCCL_UINT8, uint8_t, batch->integers[i])
        STORE(SIM_NCCL_INT32, uint32_t, batch->integers[i])
        STORE(SIM_NCCL_UINT32, uint32_t, batch->integers[i])
        STORE(SIM_NCCL_INT64, uint64_t, batch->integers[i])
        STORE(SIM_NCCL_UINT64, uint64_t, batch->integers[i])
        STORE(SIM_NCCL_HALF, uint16_t, narrow(&half_format, batch->floats[i]))
        STORE(SIM_NCCL_FLOAT, float, batch->floats[i])
        STORE(SIM_NCCL_DOUBLE, double, batch->doubles[i])
        STORE(SIM_NCCL_BFLOAT16, uint16_t, narrow(&bfloat16_format, batch->floats[i]))
        STORE(SIM_NCCL_FLOAT8_E4M3, uint8_t, narrow(&e4m3_format, batch->floats[i]))
        STORE(SIM_NCCL_FLOAT8_E5M2, uint8_t, narrow(&e5m2_format, batch->floats[i]))
    case SIM_NCCL_TYPES: break;
    }
}

typedef enum family { SIGNED, UNSIGNED, SINGLE, DOUBLE } family_t;

static family_t family_of(sim_nccl_type_t type) {
    switch (type) {
    case SIM_NCCL_INT8:
    case SIM_NCCL_INT32:
    case SIM_NCCL_INT64: return SIGNED;
    case SIM_NCCL_UINT8:
    case SIM_NCCL_UINT32:
    case SIM_NCCL_UINT64: return UNSIGNED;
    case SIM_NCCL_DOUBLE: return DOUBLE;
    default: return SINGLE;
    }
}

/* As on the device: the maximum or minimum of a number and NaN is the number. */
#define COMBINE(function, field, c_type, larger, smaller)                                                                   \
    static void function(batch_t *total, const batch_t *next, size_t count, sim_nccl_reduction_t reduction) {               \
        switch (reduction) {                                                                                                \
        case SIM_NCCL_PRODUCT:                                                                                              \
            for (size_t i = 0; i < count; i++) total->field[i] *= next->field[i];                                           \
            break;                                                                                                          \
        case SIM_NCCL_MAXIMUM:                                                                                              \
            for (size_t i = 0; i < count; i++) {                                                                            \
                c_type a = (c_type)total->field[i], b = (c_type)next->field[i];                                             \
                if (larger) total->field[i] = next->field[i];                                                               \
            }                                                                                                               \
            break;                                                                                                          \
        case SIM_NCCL_MINIMUM:                                                                                              \
            for (size_t i = 0; i < count; i++) {                                                                            \
                c_type a = (c_type)total->field[i], b = (c_type)next->field[i];                                             \
                if (smaller) total->field[i] = next->field[i];                                                              \
            }                                                                                                               \
            break;                                                                                                          \
        default:                                                                                                            \
            for (size_t i = 0; i < count; i++) total->field[i] += next->field[i];                                           \
            break;                                                                                                          \
        }                                                                                                                   \
    }

COMBINE(combine_signed, integers, int64_t, b > a, b < a)
COMBINE(combine_unsigned, integers, uint64_t, b > a, b < a)
COMBINE(combine_floats, floats, float, isnan(a) || b > a, isnan(a) || b < a)
COMBINE(combine_doubles, doubles, double, isnan(a) || b > a, isnan(a) || b < a)

static void divide(sim_nccl_type_t type, batch_t *total, size_t count, unsigned divisor) {
    uint8_t stored[BATCH * sizeof(uint64_t)];
    family_t family = family_of(type);
    /* The sum has the range of its type. */
    if (family == SIGNED || family == UNSIGNED) {
        store(type, stored, count, total);
        load(type, stored, count, total);
    }
    for (size_t i = 0; i < count; i++) {
        switch (family) {
        case SIGNED: total->integers[i] = (uint64_t)((int64_t)total->integers[i] / (int64_t)divisor); break;
        case UNSIGNED: total->integers[i] /= divisor; break;
        case SINGLE: total->floats[i] /= (float)divisor; break;
        case DOUBLE: total->doubles[i] /= divisor; break;
        }
    }
}

static void combine(sim_nccl_type_t type, batch_t *total, const batch_t *next, size_t count,
                    sim_nccl_reduction_t reduction) {
    switch (family_of(type)) {
    case SIGNED: combine_signed(total, next, count, reduction); break;
    case UNSIGNED: combine_unsigned(total, next, count, reduction); break;
    case SINGLE: combine_floats(total, next, count, reduction); break;
    case DOUBLE: combine_doubles(total, next, count, reduction); break;
    }
}

void sim_nccl_reduce(sim_nccl_type_t type, sim_nccl_reduction_t reduction, void *destination, const void *const *sources,
                     unsigned source_count, size_t count) {
    batch_t total, next;
    for (size_t done = 0; done < count; done += BATCH) {
        size_t part = count - done < BATCH ? count - done : BATCH, offset = done * types[type].bytes;
        load(type, (const char *)sources[0] + offset, part, &total);
        for (unsigned i = 1; i < source_count; i++) {
            load(type, (const char *)sources[i] + offset, part, &next);
            combine(type, &total, &next, part, reduction);
        }
        if (reduction == SIM_NCCL_AVERAGE) divide(type, &total, part, source_count);
        store(type, (char *)destination + offset, part, &total);
    }
}

void sim_nccl_scale(sim_nccl_type_t type, void *elements, size_t count, const void *factor) {
    uint8_t repeated[BATCH * sizeof(uint64_t)];
    size_t bytes = types[type].bytes;
    batch_t total, factors;
    for (size_t i = 0; i < BATCH; i++) memcpy(repeated + i * bytes, factor, bytes);
    load(type, repeated, BATCH, &factors);
    for (size_t done = 0; done < count; done += BATCH) {
        size_t part = count - done < BATCH ? count - done : BATCH;
        load(type, (char *)elements + done * bytes, part, &total);
        combine(type, &total, &factors, part, SIM_NCCL_PRODUCT);
        store(type, (char *)elements + done * bytes, part, &total);
    }
}
