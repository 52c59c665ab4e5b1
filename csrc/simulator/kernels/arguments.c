/* Arguments of PyTorch's kernels: C++ structures with the layout of its compilers, derived from the declarations in its
 * sources and validated here. A launch passes a pointer to each argument. */
#include <stdlib.h>
#include <string.h>

#include "simulator/kernels/kernel.h"

enum {
    DIVIDER_BYTES = 12, /* of an offset calculator: divisor, magic number, shift */
    /* Indices of a kernel's parameters. */
    ARGUMENT_COUNT = 0,
    ARGUMENT_FUNCTOR = 1,
    ARGUMENT_POINTERS = 2,
    ARGUMENT_STATE = 1,
    ARGUMENT_CLOSURE = 3,
    ARGUMENT_LOADER = 5,
    ARGUMENT_STORER = 6,
    /* Offsets in the configuration of a reduction. */
    CONFIG_INPUTS = 4,
    CONFIG_OUTPUTS = 8,
    CONFIG_BYTES = 64,
    /* Offsets in a reduction, from its source pointer. */
    REDUCTION_DESTINATION = 8,
    REDUCTION_ACCUMULATES = 56,
    REDUCTION_FINAL = 57,
};

/* Reads a structure member by member, each with its natural alignment. */
typedef struct reader {
    const uint8_t *start;
    size_t offset;
} reader_t;

static const uint8_t *next(reader_t *reader, size_t bytes, size_t alignment) {
    reader->offset = (reader->offset + alignment - 1) / alignment * alignment;
    const uint8_t *member = reader->start + reader->offset;
    reader->offset += bytes;
    return member;
}

static uint32_t next_uint32(reader_t *reader) {
    uint32_t value;
    memcpy(&value, next(reader, sizeof value, sizeof value), sizeof value);
    return value;
}

static uint64_t next_pointer(reader_t *reader) {
    uint64_t value;
    memcpy(&value, next(reader, sizeof value, sizeof value), sizeof value);
    return value;
}

static sim_number_t next_number(reader_t *reader, sim_type_t type) {
    sim_number_t number;
    size_t bytes = sim_type_bytes(type);
    uint64_t address = (uintptr_t)next(reader, bytes, bytes);
    sim_type_load(type, &address, 1, &number);
    return number;
}

/* Reads an offset calculator for this number of operands; their strides fill the columns from `column` on. */
static bool next_offsets(reader_t *reader, unsigned operands, sim_offsets_t *offsets) {
    reader_t calculator = {.start = next(reader, 0, sizeof(uint32_t))};
    offsets->dims = next_uint32(&calculator);
    reader_t divider = calculator;
    calculator.offset += (size_t)SIM_KERNEL_DIMS * DIVIDER_BYTES;
    for (unsigned i = 0; i < SIM_KERNEL_DIMS; i++) {
        offsets->sizes[i] = next_uint32(&divider);
        divider.offset += DIVIDER_BYTES - sizeof(uint32_t);
        for (unsigned k = 0; k < operands; k++) offsets->strides[i][k] = next_uint32(&calculator);
    }
    reader->offset += calculator.offset;
    for (unsigned i = 0; i < offsets->dims && i < SIM_KERNEL_DIMS; i++) {
        if (!offsets->sizes[i]) return false;
    }
    return offsets->dims <= SIM_KERNEL_DIMS;
}

/* Reads the numbers in the functor. Members of an inner functor come first: the kind of comparison, or an empty structure
 * of one byte. */
static void read_functor(reader_t *reader, sim_kernel_t *kernel) {
    sim_type_t type = kernel->name.compute;
    switch (kernel->name.operation) {
    case SIM_FILL: kernel->constant = next_number(reader, type); return;
    case SIM_ADD:
        if (kernel->name.constant != SIM_CONSTANT_NONE) kernel->constant = next_number(reader, type);
        kernel->factor = next_number(reader, type);
        return;
    case SIM_COMPARE: kernel->negated = next_uint32(reader) != 0; break;
    default: next(reader, 1, 1); break;
    }
    if (kernel->name.constant != SIM_CONSTANT_NONE) kernel->constant = next_number(reader, type);
}

static size_t functor_alignment(const sim_kernel_name_t *name) {
    bool holds_numbers = name->constant != SIM_CONSTANT_NONE || name->operation == SIM_ADD;
    size_t alignment = holds_numbers ? sim_type_bytes(name->compute) : 1;
    return name->operation == SIM_COMPARE && alignment < sizeof(uint32_t) ? sizeof(uint32_t) : alignment;
}

static void read_pointers(reader_t *reader, sim_kernel_t *kernel) {
    for (unsigned i = 0; i <= kernel->name.inputs; i++) {
        kernel->operands[i].type = i ? kernel->name.input : kernel->name.output;
        kernel->operands[i].address = next_pointer(reader);
    }
}

static bool read_dense(sim_kernel_t *kernel, void *const *arguments) {
    reader_t functor = {.start = arguments[ARGUMENT_FUNCTOR]}, pointers = {.start = arguments[ARGUMENT_POINTERS]};
    read_functor(&functor, kernel);
    read_pointers(&pointers, kernel);
    for (unsigned i = 0; i <= kernel->name.inputs; i++) kernel->operands[i].dense = true;
    if (!kernel->name.casts) return true;
    const int8_t *loaded = arguments[ARGUMENT_LOADER], *stored = arguments[ARGUMENT_STORER];
    kernel->operands[0].type = (sim_type_t)stored[0];
    for (unsigned i = 1; i <= kernel->name.inputs; i++) kernel->operands[i].type = (sim_type_t)loaded[i - 1];
    return true;
}

/* The closure contains the captured variables in the order of their use. */
static bool read_strided(sim_kernel_t *kernel, void *const *arguments) {
    reader_t closure = {.start = arguments[ARGUMENT_FUNCTOR]};
    bool understood = next_offsets(&closure, kernel->name.inputs + 1, &kernel->offsets);
    read_pointers(&closure, kernel);
    size_t alignment = functor_alignment(&kernel->name);
    reader_t functor = {.start = next(&closure, 0, alignment)};
    read_functor(&functor, kernel);
    closure.offset += (functor.offset + alignment - 1) / alignment * alignment;
    for (unsigned i = 0; kernel->name.casts && i <= kernel->name.inputs; i++)
        kernel->operands[i].type = (sim_type_t)(int8_t)*next(&closure, 1, 1);
    return understood;
}

/* The structure contains the operation, its initial value, the configuration, both calculators, and the pointers. */
static bool read_reduction(sim_kernel_t *kernel, void *const *arguments) {
    reader_t reader = {.start = arguments[0]};
    uint32_t inputs = 0, outputs = 0;
    if (kernel->name.operation == SIM_MEAN)
        kernel->factor = next_number(&reader, kernel->name.compute);
    else
        next(&reader, 1, 1);
    next_number(&reader, kernel->name.compute);
    const uint8_t *config = next(&reader, CONFIG_BYTES, sizeof(uint32_t));
    memcpy(&inputs, config + CONFIG_INPUTS, sizeof inputs);
    memcpy(&outputs, config + CONFIG_OUTPUTS, sizeof outputs);
    bool understood = next_offsets(&reader, 1, &kernel->input);
    understood = next_offsets(&reader, 2, &kernel->offsets) && understood;
    const uint8_t *source = next(&reader, sizeof(uint64_t), sizeof(uint64_t));
    memcpy(&kernel->operands[1].address, source, sizeof kernel->operands[1].address);
    memcpy(&kernel->operands[0].address, source + REDUCTION_DESTINATION, sizeof kernel->operands[0].address);
    kernel->operands[0].type = kernel->name.output;
    kernel->operands[1].type = kernel->name.input;
    kernel->operands[1].dense = kernel->input.dims == 1 && kernel->input.strides[0][0] == sim_type_bytes(kernel->name.input);
    kernel->accumulates = source[REDUCTION_ACCUMULATES] != 0;
    kernel->count = outputs;
    kernel->reduced = inputs;
    return understood && source[REDUCTION_FINAL] != 0;
}

static bool read_range(sim_kernel_t *kernel, void *const *arguments) {
    reader_t closure = {.start = arguments[ARGUMENT_FUNCTOR]}, pointers = {.start = arguments[ARGUMENT_POINTERS]};
    kernel->constant = next_number(&closure, kernel->name.compute); /* the first value */
    kernel->factor = next_number(&closure, kernel->name.compute);   /* the step */
    read_pointers(&pointers, kernel);
    kernel->operands[0].dense = true;
    return true;
}

/* In a capture the seed and the offset are pointers to those of the replay, followed by an addend for the offset: 32 or
 * 64 bits, of which the lower ones are used. */
static bool read_random(sim_kernel_t *kernel, void *const *arguments, bool captured) {
    reader_t state = {.start = arguments[ARGUMENT_STATE]}, closure = {.start = arguments[ARGUMENT_CLOSURE]};
    int64_t count;
    memcpy(&count, arguments[ARGUMENT_COUNT], sizeof count);
    kernel->count = (uint64_t)count;
    uint64_t seed = next_pointer(&state), offset = next_pointer(&state);
    if (captured) {
        kernel->draw = (tms_sim_draw_t){next_uint32(&state), seed, offset};
    } else {
        kernel->draw = (tms_sim_draw_t){.seed = sim_random_seed(seed, offset)};
    }
    read_pointers(&closure, kernel);
    kernel->offsets = (sim_offsets_t){.dims = 1, .sizes = {(uint32_t)count}, .strides = {{next_uint32(&closure)}}};
    if (kernel->name.operation == SIM_RANDOM) return true;
    /* The start of a uniform distribution has the output type. */
    bool uniform = kernel->name.operation == SIM_UNIFORM;
    sim_number_t first = next_number(&closure, kernel->name.compute);
    sim_number_t second = next_number(&closure, uniform ? kernel->name.output : kernel->name.compute);
    bool mean_first = kernel->name.operation == SIM_NORMAL; /* the others: range, then start */
    kernel->constant = mean_first ? first : second;
    kernel->factor = mean_first ? second : first;
    return kernel->name.operation != SIM_RANDOM_FROM || kernel->factor.integer != 0;
}

sim_kernel_t *sim_kernel_new(const sim_kernel_name_t *name, void *const *arguments, bool captured, bool *understood) {
    sim_kernel_t *kernel = calloc(1, sizeof *kernel);
    *understood = true;
    if (!kernel) return NULL;
    kernel->name = *name;
    kernel->references = 1;
    if (name->shape != SIM_SHAPE_REDUCTION && name->shape != SIM_SHAPE_RANDOM) {
        uint32_t count;
        memcpy(&count, arguments[ARGUMENT_COUNT], sizeof count);
        kernel->count = count;
    }
    switch (name->shape) {
    case SIM_SHAPE_DENSE:
    case SIM_SHAPE_UNROLLED: *understood = read_dense(kernel, arguments); break;
    case SIM_SHAPE_STRIDED:
    case SIM_SHAPE_STRIDED_CAST: *understood = read_strided(kernel, arguments); break;
    case SIM_SHAPE_REDUCTION: *understood = read_reduction(kernel, arguments); break;
    case SIM_SHAPE_RANDOM: *understood = read_random(kernel, arguments, captured); break;
    case SIM_SHAPE_INDEX: *understood = read_range(kernel, arguments); break;
    }
    for (unsigned i = 0; i <= name->inputs; i++) *understood = *understood && sim_type_bytes(kernel->operands[i].type);
    if (*understood) return kernel;
    free(kernel);
    return NULL;
}
