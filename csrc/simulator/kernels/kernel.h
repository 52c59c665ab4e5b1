/* Interpretation of PyTorch's kernels: mangled names (kernels/names.c), arguments of a launch (kernels/arguments.c), and
 * execution by a stream (kernels/interpret.c, with the arithmetic of kernels/elementwise.c). Only execution and
 * references need the simulator's lock. */
#ifndef TMS_SIM_KERNELS_KERNEL_H
#define TMS_SIM_KERNELS_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/base/state.h"

enum {
    SIM_KERNEL_OPERANDS = 3, /* one output, at most two inputs */
    SIM_KERNEL_DIMS = 25,    /* dimensions of PyTorch's offset calculators */
    SIM_KERNEL_BATCH = 512,  /* elements per batch */
};

/* Element types with the numbers of c10::ScalarType, which conversion kernels have in their arguments. */
typedef enum sim_type {
    SIM_TYPE_NONE = -1,
    SIM_TYPE_UINT8 = 0,
    SIM_TYPE_INT8 = 1,
    SIM_TYPE_INT16 = 2,
    SIM_TYPE_INT32 = 3,
    SIM_TYPE_INT64 = 4,
    SIM_TYPE_HALF = 5,
    SIM_TYPE_FLOAT = 6,
    SIM_TYPE_DOUBLE = 7,
    SIM_TYPE_BOOL = 11,
    SIM_TYPE_BFLOAT16 = 15,
} sim_type_t;

/* How a kernel addresses its elements, with its arguments. */
typedef enum sim_shape {
    SIM_SHAPE_DENSE,        /* (n, functor, pointers): vectorized_elementwise_kernel */
    SIM_SHAPE_UNROLLED,     /* (n, functor, pointers, calculator, calculator, loader, storer) */
    SIM_SHAPE_STRIDED,      /* (n, closure of an offset calculator, the pointers and the functor) */
    SIM_SHAPE_STRIDED_CAST, /* as SIM_SHAPE_STRIDED, with the operands' types at the end */
    SIM_SHAPE_REDUCTION,    /* (one structure) */
    SIM_SHAPE_RANDOM,       /* (n, generator's state, distribution, closure of pointer, stride and transformation) */
    SIM_SHAPE_INDEX,        /* (n, closure of step and start, pointer): arange */
} sim_shape_t;

typedef enum sim_operation {
    SIM_FILL,
    SIM_COPY,
    SIM_ADD, /* first + factor * second */
    SIM_MULTIPLY,
    SIM_DIVIDE,
    SIM_COMPARE, /* equal or not equal, as the functor says */
    SIM_AND,
    SIM_OR,
    SIM_ABSOLUTE,
    SIM_MAXIMUM,
    SIM_MINIMUM,
    SIM_MEAN,
    SIM_RANGE,
    SIM_NORMAL,      /* constant + factor * a normally distributed number */
    SIM_UNIFORM,     /* constant + factor * [0, 1) */
    SIM_RANDOM,      /* non-negative integers that the type represents exactly */
    SIM_RANDOM_FROM, /* constant + an integer below factor */
} sim_operation_t;

/* Which operand of the operation is a constant in the functor. */
typedef enum sim_constant { SIM_CONSTANT_NONE, SIM_CONSTANT_FIRST, SIM_CONSTANT_SECOND } sim_constant_t;

typedef struct sim_kernel_name {
    sim_shape_t shape;
    sim_operation_t operation;
    sim_constant_t constant;
    bool casts;         /* the arguments contain the types in memory */
    unsigned inputs;    /* number of input tensors */
    sim_type_t input;   /* type of the functor's arguments */
    sim_type_t compute; /* type of the computation and of the functor's constants */
    sim_type_t output;  /* type of the functor's result */
} sim_kernel_name_t;

/* A number of any type: `real` for floating-point types, `integer` for the others. */
typedef union sim_number {
    double real;
    int64_t integer;
} sim_number_t;

/* Converts an index to byte offsets for several operands. */
typedef struct sim_offsets {
    unsigned dims;
    uint32_t sizes[SIM_KERNEL_DIMS];
    uint32_t strides[SIM_KERNEL_DIMS][SIM_KERNEL_OPERANDS];
} sim_offsets_t;

struct sim_kernel {
    unsigned references; /* held by queued work and graphs */
    sim_kernel_name_t name;
    uint64_t count; /* number of elements written */
    struct {
        sim_type_t type;
        uint64_t address;
        bool dense;
    } operands[SIM_KERNEL_OPERANDS]; /* the first is the output */
    sim_number_t constant, factor;
    bool negated;          /* SIM_COMPARE: not equal */
    tms_sim_draw_t draw;   /* of random numbers */
    sim_offsets_t offsets; /* of all operands; of a reduction: of the output and the start of its input */
    uint64_t reduced;      /* of a reduction: input elements per output */
    sim_offsets_t input;   /* of a reduction: offsets within its input */
    bool accumulates;      /* of a reduction: adds to the existing output */
};

/* kernels/registry.c: the mangled name of a registered function, or NULL. Does not need the simulator's lock. */
const char *sim_kernel_registered(const void *function);

/* kernels/interpret.c: executes a kernel for its stream. Called with the lock held, which is released while bytes are
 * touched. */
CUresult sim_kernel_work(sim_stream_t *stream, const sim_kernel_t *launched);
/* References of queued work and graphs to their kernel. Called with the lock held. Both accept NULL. */
sim_kernel_t *sim_kernel_retain(sim_kernel_t *kernel);
void sim_kernel_release(sim_kernel_t *kernel);

/* kernels/names.c: parses a name. False for a kernel that is not interpreted. */
bool sim_kernel_parse(const char *mangled, sim_kernel_name_t *name);
/* Whether a kernel only occupies its stream, for as many clock cycles as its argument (int64_t) says. */
bool sim_kernel_sleeps(const char *mangled);

/* kernels/arguments.c: reads the arguments, which are valid only during the launch. NULL if out of memory, or, with
 * *understood false, if the arguments are not supported. `captured`: the launch is captured. */
sim_kernel_t *sim_kernel_new(const sim_kernel_name_t *name, void *const *arguments, bool captured, bool *understood);

/* kernels/elementwise.c: numbers of one type in memory, and arithmetic on them. */
size_t sim_type_bytes(sim_type_t type); /* 0 for an unknown type */
bool sim_type_is_real(sim_type_t type);
void sim_type_load(sim_type_t type, const uint64_t *addresses, size_t count, sim_number_t *numbers);
void sim_type_store(sim_type_t type, const uint64_t *addresses, size_t count, const sim_number_t *numbers);
void sim_type_convert(sim_type_t from, sim_type_t to, size_t count, sim_number_t *numbers);
/* first[i] = the operation on first[i] and second[i], in the computing type. Comparisons give the integer 0 or 1. */
void sim_operation_apply(const sim_kernel_t *kernel, size_t count, sim_number_t *first, const sim_number_t *second);
/* The initial value of a reduction, and its next value. */
sim_number_t sim_operation_start(const sim_kernel_t *kernel);
sim_number_t sim_operation_combine(const sim_kernel_t *kernel, sim_number_t total, const sim_number_t *numbers,
                                   size_t count);

/* kernels/dense.c: the same over dense memory of one type, without a type check per number. Whether a kernel qualifies,
 * and its execution from element `first` on. */
bool sim_dense_applies(const sim_kernel_t *kernel);
void sim_dense_compute(const sim_kernel_t *kernel, uint64_t first, uint64_t count);
/* Whether a reduction's input at an address qualifies, and the total with the elements there added. */
bool sim_dense_reduces(const sim_kernel_t *kernel, uint64_t address);
sim_number_t sim_dense_reduce(const sim_kernel_t *kernel, sim_number_t total, uint64_t address, size_t count);

/* kernels/random.c: elements of a random kernel from `first` on. They depend on the generator's state as on the device,
 * but differ from the device's numbers. */
uint64_t sim_random_seed(uint64_t seed, uint64_t offset);
/* Replaces the addresses of a captured draw by the values of this replay. False if they are not accessible. Called with
 * the simulator's lock held. */
bool sim_random_read(const sim_context_t *context, tms_sim_draw_t *draw);
/* The number drawn, which is not negative as an int64_t. The draw has no addresses. */
uint64_t sim_random_number(const tms_sim_draw_t *draw);
void sim_random_numbers(const sim_kernel_t *kernel, uint64_t first, size_t count, sim_number_t *numbers);

#endif
