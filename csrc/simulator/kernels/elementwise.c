/* Numbers of PyTorch's types in memory, and batch arithmetic on them. Floating-point numbers are computed in double and
 * rounded once to the type; for one addition, multiplication or division this equals the type's own arithmetic. */
#include <math.h>
#include <string.h>

#include "simulator/kernels/kernel.h"

size_t sim_type_bytes(sim_type_t type) {
    switch (type) {
    case SIM_TYPE_UINT8:
    case SIM_TYPE_INT8:
    case SIM_TYPE_BOOL: return sizeof(uint8_t);
    case SIM_TYPE_INT16:
    case SIM_TYPE_HALF:
    case SIM_TYPE_BFLOAT16: return sizeof(uint16_t);
    case SIM_TYPE_INT32:
    case SIM_TYPE_FLOAT: return sizeof(uint32_t);
    case SIM_TYPE_INT64:
    case SIM_TYPE_DOUBLE: return sizeof(uint64_t);
    case SIM_TYPE_NONE: break;
    }
    return 0;
}

bool sim_type_is_real(sim_type_t type) {
    return type == SIM_TYPE_HALF || type == SIM_TYPE_FLOAT || type == SIM_TYPE_DOUBLE || type == SIM_TYPE_BFLOAT16;
}

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* bfloat16 is the upper half of a float. */
static double from_bfloat16(uint16_t bits) { return (double)float_of_bits((uint32_t)bits << 16); }

static uint16_t to_bfloat16(double number) {
    uint32_t bits = bits_of_float((float)number);
    if (isnan(number)) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* rounds to nearest, ties to even */
}

/* Two's complement. */
static int64_t from_int8(uint8_t bits) { return bits > INT8_MAX ? (int64_t)bits - UINT8_MAX - 1 : bits; }

enum { HALF_FRACTION = 10, HALF_BIAS = 15, HALF_INFINITY = 0x7c00, HALF_NAN = 0x7e00, HALF_SIGN = 0x8000 };

static double from_half(uint16_t bits) {
    int exponent = (bits & HALF_INFINITY) >> HALF_FRACTION, fraction = bits & ((1 << HALF_FRACTION) - 1);
    double value = 0;
    if (exponent == HALF_INFINITY >> HALF_FRACTION)
        value = fraction ? (double)NAN : (double)INFINITY;
    else if (exponent)
        value = ldexp((1 << HALF_FRACTION) + fraction, exponent - HALF_BIAS - HALF_FRACTION);
    else
        value = ldexp(fraction, 1 - HALF_BIAS - HALF_FRACTION);
    return bits & HALF_SIGN ? -value : value;
}

static uint16_t to_half(double number) {
    double value = fabs((double)(float)number);
    uint16_t sign = signbit(number) ? HALF_SIGN : 0;
    int exponent = 0;
    if (isnan(number)) return HALF_NAN;
    if (isinf(value)) return sign | HALF_INFINITY;
    if (value == 0) return sign;
    frexp(value, &exponent); /* value = [0.5, 1) * 2^exponent */
    int lowest = exponent - 1 < 1 - HALF_BIAS ? 1 - HALF_BIAS : exponent - 1;
    /* In units of the last place. Adding a number that leaves no fraction bits rounds ties to even. A carry into the
     * exponent is correct without special handling. */
    double units = ldexp(value, HALF_FRACTION - lowest) + 0x1p52 - 0x1p52;
    double bits = units + (double)((lowest + HALF_BIAS - 1) << HALF_FRACTION);
    return sign | (bits >= HALF_INFINITY ? HALF_INFINITY : (uint16_t)bits);
}

#define LOAD(code, c_type, field, expression)                                                                               \
    case code:                                                                                                              \
        for (size_t i = 0; i < count; i++) {                                                                                \
            c_type value;                                                                                                   \
            memcpy(&value, (const void *)(uintptr_t)addresses[i], sizeof value);                                            \
            numbers[i].field = (expression);                                                                                \
        }                                                                                                                   \
        break;

void sim_type_load(sim_type_t type, const uint64_t *addresses, size_t count, sim_number_t *numbers) {
    switch (type) {
        LOAD(SIM_TYPE_UINT8, uint8_t, integer, value)
        LOAD(SIM_TYPE_INT8, uint8_t, integer, from_int8(value))
        LOAD(SIM_TYPE_BOOL, uint8_t, integer, value != 0)
        LOAD(SIM_TYPE_INT16, int16_t, integer, value)
        LOAD(SIM_TYPE_INT32, int32_t, integer, value)
        LOAD(SIM_TYPE_INT64, int64_t, integer, value)
        LOAD(SIM_TYPE_HALF, uint16_t, real, from_half(value))
        LOAD(SIM_TYPE_BFLOAT16, uint16_t, real, from_bfloat16(value))
        LOAD(SIM_TYPE_FLOAT, float, real, (double)value)
        LOAD(SIM_TYPE_DOUBLE, double, real, value)
    case SIM_TYPE_NONE: break;
    }
}

#define STORE(code, c_type, expression)                                                                                     \
    case code:                                                                                                              \
        for (size_t i = 0; i < count; i++) {                                                                                \
            c_type value = (c_type)(expression);                                                                            \
            memcpy((void *)(uintptr_t)addresses[i], &value, sizeof value);                                                  \
        }                                                                                                                   \
        break;

void sim_type_store(sim_type_t type, const uint64_t *addresses, size_t count, const sim_number_t *numbers) {
    switch (type) {
        STORE(SIM_TYPE_UINT8, uint8_t, numbers[i].integer)
        STORE(SIM_TYPE_INT8, uint8_t, numbers[i].integer)
        STORE(SIM_TYPE_BOOL, uint8_t, numbers[i].integer != 0)
        STORE(SIM_TYPE_INT16, uint16_t, numbers[i].integer)
        STORE(SIM_TYPE_INT32, uint32_t, numbers[i].integer)
        STORE(SIM_TYPE_INT64, int64_t, numbers[i].integer)
        STORE(SIM_TYPE_HALF, uint16_t, to_half(numbers[i].real))
        STORE(SIM_TYPE_BFLOAT16, uint16_t, to_bfloat16(numbers[i].real))
        STORE(SIM_TYPE_FLOAT, float, numbers[i].real)
        STORE(SIM_TYPE_DOUBLE, double, numbers[i].real)
    case SIM_TYPE_NONE: break;
    }
}

/* Rounds or wraps a number to the type. */
static sim_number_t fit(sim_type_t type, sim_number_t number) {
    switch (type) {
    case SIM_TYPE_UINT8: number.integer = (uint8_t)number.integer; break;
    case SIM_TYPE_INT8: number.integer = from_int8((uint8_t)number.integer); break;
    case SIM_TYPE_BOOL: number.integer = number.integer != 0; break;
    case SIM_TYPE_INT16: number.integer = (int16_t)number.integer; break;
    case SIM_TYPE_INT32: number.integer = (int32_t)number.integer; break;
    case SIM_TYPE_HALF: number.real = from_half(to_half(number.real)); break;
    case SIM_TYPE_BFLOAT16: number.real = from_bfloat16(to_bfloat16(number.real)); break;
    case SIM_TYPE_FLOAT: number.real = (double)(float)number.real; break;
    case SIM_TYPE_INT64:
    case SIM_TYPE_DOUBLE:
    case SIM_TYPE_NONE: break;
    }
    return number;
}

/* Converts as the device does: towards zero, clamped to the range, and NaN to 0. */
static int64_t to_integer(double number, double lowest, double above) {
    if (isnan(number)) return 0;
    if (number < lowest) return (int64_t)lowest;
    if (number >= above) return above >= 0x1p63 ? INT64_MAX : (int64_t)(above - 1);
    return (int64_t)number;
}

static sim_number_t convert_one(sim_type_t from, sim_type_t to, sim_number_t number) {
    bool was_real = sim_type_is_real(from), is_real = sim_type_is_real(to);
    sim_number_t result = number;
    if (was_real && to == SIM_TYPE_BOOL)
        result.integer = number.real != 0;
    else if (was_real && to == SIM_TYPE_INT32)
        result.integer = to_integer(number.real, -0x1p31, 0x1p31);
    else if (was_real && !is_real)
        result.integer = to_integer(number.real, -0x1p63, 0x1p63);
    else if (!was_real && is_real)
        result.real = to == SIM_TYPE_DOUBLE ? (double)number.integer : (double)(float)number.integer;
    return fit(to, result);
}

void sim_type_convert(sim_type_t from, sim_type_t to, size_t count, sim_number_t *numbers) {
    if (from == to) return;
    for (size_t i = 0; i < count; i++) numbers[i] = convert_one(from, to, numbers[i]);
}

/* Integers wrap around; signed overflow is undefined in C. */
static int64_t wrapping_sum(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }

static int64_t wrapping_product(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

static double real_result(const sim_kernel_t *kernel, double a, double b) {
    switch (kernel->name.operation) {
    case SIM_ADD: return a + kernel->factor.real * b;
    case SIM_MULTIPLY: return a * b;
    case SIM_DIVIDE: return a / b;
    case SIM_ABSOLUTE: return fabs(a);
    case SIM_FILL: return kernel->constant.real;
    default: return a;
    }
}

static int64_t integer_result(const sim_kernel_t *kernel, int64_t a, int64_t b) {
    switch (kernel->name.operation) {
    case SIM_ADD: return wrapping_sum(a, wrapping_product(kernel->factor.integer, b));
    case SIM_MULTIPLY: return wrapping_product(a, b);
    case SIM_AND: return a & b;
    case SIM_OR: return a | b;
    case SIM_ABSOLUTE: return a < 0 ? wrapping_product(a, -1) : a;
    case SIM_FILL: return kernel->constant.integer;
    default: return a;
    }
}

void sim_operation_apply(const sim_kernel_t *kernel, size_t count, sim_number_t *first, const sim_number_t *second) {
    sim_type_t type = kernel->name.compute;
    bool real = sim_type_is_real(type);
    if (kernel->name.operation == SIM_COPY) return;
    for (size_t i = 0; i < count; i++) {
        if (kernel->name.operation == SIM_COMPARE) {
            bool equal = real ? first[i].real == second[i].real : first[i].integer == second[i].integer;
            first[i].integer = equal != kernel->negated;
            continue;
        }
        if (real)
            first[i].real = real_result(kernel, first[i].real, second[i].real);
        else
            first[i].integer = integer_result(kernel, first[i].integer, second[i].integer);
    }
    if (kernel->name.operation == SIM_COMPARE || type == SIM_TYPE_INT64 || type == SIM_TYPE_DOUBLE) return;
    for (size_t i = 0; i < count; i++) first[i] = fit(type, first[i]);
}
