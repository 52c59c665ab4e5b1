/* Kernels of PyTorch that are interpreted: what a mangled name says (kernels/names.c), what a launch's arguments add to it
 * (kernels/arguments.c), and the work of it on a stream (kernels/interpret.c, over the numbers of kernels/elementwise.c).
 * Only interpreting, and holding references, needs the simulator's lock. */
#ifndef TMS_SIM_KERNELS_KERNEL_H
#define TMS_SIM_KERNELS_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/base/state.h"

enum {
    SIM_KERNEL_OPERANDS = 3, /* one written, at most two read */
    SIM_KERNEL_DIMS = 25,    /* of an offset calculator of PyTorch */
    SIM_KERNEL_BATCH = 512,  /* elements that are computed at a time */
};

/* Element types, by the numbers of c10::ScalarType, which conversion kernels carry in their arguments. */
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

/* How a kernel gets at its elements. */
typedef enum sim_shape {
    SIM_SHAPE_DENSE,        /* (n, functor, pointers): vectorized_elementwise_kernel */
    SIM_SHAPE_UNROLLED,     /* (n, functor, pointers, calculator, calculator, loader, storer) */
    SIM_SHAPE_STRIDED,      /* (n, closure of an offset calculator, the pointers and the functor) */
    SIM_SHAPE_STRIDED_CAST, /* the same with the operands' types at the end */
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
    SIM_COMPARE, /* equal, or not: the functor says */
    SIM_AND,
    SIM_OR,
    SIM_ABSOLUTE,
    SIM_MAXIMUM,
    SIM_MINIMUM,
    SIM_MEAN,
    SIM_RANGE,
    SIM_NORMAL,      /* constant + factor * a normal number */
    SIM_UNIFORM,     /* constant + factor * [0, 1) */
    SIM_RANDOM,      /* whole numbers that the type can hold, not below 0 */
    SIM_RANDOM_FROM, /* constant + a whole number below factor */
} sim_operation_t;

/* Which of the operation's operands is a number in the functor. */
typedef enum sim_constant { SIM_CONSTANT_NONE, SIM_CONSTANT_FIRST, SIM_CONSTANT_SECOND } sim_constant_t;

typedef struct sim_kernel_name {
    sim_shape_t shape;
    sim_operation_t operation;
    sim_constant_t constant;
    bool casts;         /* the arguments say which types are in memory */
    unsigned inputs;    /* tensors that are read */
    sim_type_t input;   /* what the functor takes */
    sim_type_t compute; /* what it computes with, and its numbers have */
    sim_type_t output;  /* what it returns */
} sim_kernel_name_t;

/* A number of any type: `real` of the floating ones, `whole` of the others. */
typedef union sim_number {
    double real;
    int64_t whole;
} sim_number_t;

/* How an index becomes offsets in bytes, for several operands. */
typedef struct sim_offsets {
    unsigned dims;
    uint32_t sizes[SIM_KERNEL_DIMS];
    uint32_t strides[SIM_KERNEL_DIMS][SIM_KERNEL_OPERANDS];
} sim_offsets_t;

struct sim_kernel {
    unsigned references; /* of queued work and of graphs */
    sim_kernel_name_t name;
    uint64_t count; /* of elements that are written */
    struct {
        sim_type_t type;
        uint64_t address;
        bool dense;
    } operands[SIM_KERNEL_OPERANDS]; /* the first is written */
    sim_number_t constant, factor;
    bool negated;                          /* SIM_COMPARE: not equal */
    uint64_t seed;                         /* of random numbers; of captured ones: what is added to the offset */
    uint64_t seed_address, offset_address; /* of captured random numbers: on the device, where each replay has others */
    sim_offsets_t offsets;                 /* of all operands; of a reduction: of the output, and where its input starts */
    uint64_t reduced;                      /* of a reduction: elements for each output */
    sim_offsets_t input;                   /* of a reduction: within those */
    bool accumulates;                      /* of a reduction: into what is there */
};

/* kernels/registry.c: the mangled name of a registered function, or NULL. Needs no lock of the simulator's. */
const char *sim_kernel_registered(const void *function);

/* kernels/interpret.c: interprets a kernel for its stream; the lock is held, and free while bytes are touched. */
CUresult sim_kernel_work(sim_stream_t *stream, const sim_kernel_t *launched);
/* Work that is queued or part of a graph holds a reference to its kernel; with the lock held. NULL stays NULL. */
sim_kernel_t *sim_kernel_retain(sim_kernel_t *kernel);
void sim_kernel_release(sim_kernel_t *kernel);

/* kernels/names.c. False for a kernel that is not interpreted. */
bool sim_kernel_parse(const char *mangled, sim_kernel_name_t *name);
/* Whether it is one that may be left out always. */
bool sim_kernel_is_harmless(const char *mangled);

/* kernels/arguments.c: reads the arguments, which are valid during the launch only. NULL without memory, or (`understood`
 * false) where they say something that is not interpreted. `captured`: the launch is captured. */
sim_kernel_t *sim_kernel_new(const sim_kernel_name_t *name, void *const *arguments, bool captured, bool *understood);

/* kernels/elementwise.c: numbers of one type in memory, and computing with them. */
size_t sim_type_bytes(sim_type_t type); /* 0 for a type that is not one */
bool sim_type_is_real(sim_type_t type);
void sim_type_load(sim_type_t type, const uint64_t *addresses, size_t count, sim_number_t *numbers);
void sim_type_store(sim_type_t type, const uint64_t *addresses, size_t count, const sim_number_t *numbers);
void sim_type_convert(sim_type_t from, sim_type_t to, size_t count, sim_number_t *numbers);
/* first[i] = the operation on first[i] and second[i], numbers of the computing type; comparisons give whole 0 or 1. */
void sim_operation_apply(const sim_kernel_t *kernel, size_t count, sim_number_t *first, const sim_number_t *second);
/* What a reduction starts with, and its next value. */
sim_number_t sim_operation_start(const sim_kernel_t *kernel);
sim_number_t sim_operation_combine(const sim_kernel_t *kernel, sim_number_t total, const sim_number_t *numbers,
                                   size_t count);

/* kernels/dense.c: the same over dense memory of one type, without a look at each number's type. Whether a kernel is one of
 * those, and then what it does to its elements from `first` on. */
bool sim_dense_applies(const sim_kernel_t *kernel);
void sim_dense_compute(const sim_kernel_t *kernel, uint64_t first, uint64_t count);
/* Whether a reduction's input at an address is such memory, and then the total with the elements there added to it. */
bool sim_dense_reduces(const sim_kernel_t *kernel, uint64_t address);
sim_number_t sim_dense_reduce(const sim_kernel_t *kernel, sim_number_t total, uint64_t address, size_t count);

/* kernels/random.c: elements `first` and on of a random kernel. They depend on the generator's state as they do on the
 * device, but are not the numbers that a device gives. */
uint64_t sim_random_seed(uint64_t seed, uint64_t offset);
void sim_random_numbers(const sim_kernel_t *kernel, uint64_t first, size_t count, sim_number_t *numbers);

#endif
