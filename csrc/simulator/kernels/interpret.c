/* Execution of an interpreted kernel by its stream's worker, in stretches of elements. The worker looks up and pins a
 * stretch's memory with the lock held and computes without it, as copies do. Access to unmapped memory is a fault of the
 * context. */
#include <stdlib.h>
#include <string.h>

#include "simulator/base/state.h"
#include "simulator/kernels/kernel.h"
#include "simulator/memory/touch.h"

enum {
    WINDOWS = 4,             /* mappings per operand in a stretch */
    STRETCH = 1 << 16,       /* elements between two lookups of the mappings */
    DENSE_STRETCH = 1 << 20, /* for dense kernels, which are faster */
    RANGE_LIMIT = INT32_MAX, /* maximum bytes of a window */
};

/* A pinned range of memory. */
typedef struct window {
    uint64_t address, end;
    sim_mapping_t *mapping;
} window_t;

typedef struct pins {
    window_t windows[SIM_KERNEL_OPERANDS][WINDOWS];
    unsigned counts[SIM_KERNEL_OPERANDS];
} pins_t;

typedef enum reach { REACHED, FULL, FAULT } reach_t;

/* The progress of a kernel. */
typedef struct progress {
    uint64_t element; /* the next element to write or to reduce to */
    uint64_t input;   /* of a reduction: the next input */
    sim_number_t total;
} progress_t;

static uint64_t offset_of(const sim_offsets_t *offsets, uint64_t index, unsigned operand) {
    uint64_t offset = 0;
    for (unsigned i = 0; i < offsets->dims; i++) {
        offset += index % offsets->sizes[i] * offsets->strides[i][operand];
        index /= offsets->sizes[i];
    }
    return offset;
}

static uint64_t address_of(const sim_kernel_t *kernel, unsigned operand, uint64_t index, uint64_t output) {
    uint64_t base = kernel->operands[operand].address;
    bool reads_to_reduce = kernel->name.shape == SIM_SHAPE_REDUCTION && operand;
    if (reads_to_reduce) base += offset_of(&kernel->offsets, output, operand);
    if (kernel->operands[operand].dense) return base + index * sim_type_bytes(kernel->operands[operand].type);
    return base + (reads_to_reduce ? offset_of(&kernel->input, index, 0) : offset_of(&kernel->offsets, index, operand));
}

/* Ensures that a pinned window contains the byte, and returns the window's end. */
static reach_t reach(const sim_context_t *context, pins_t *pins, unsigned operand, uint64_t address, uint64_t *end) {
    unsigned count = pins->counts[operand];
    window_t *windows = pins->windows[operand];
    for (unsigned i = count; i-- > 0;) {
        if (address < windows[i].address || address >= windows[i].end) continue;
        *end = windows[i].end;
        return REACHED;
    }
    if (count == WINDOWS) return FULL;
    uint64_t bytes = RANGE_LIMIT;
    if (address > UINT64_MAX - bytes) return FAULT;
    sim_mapping_t *mapping = sim_memory_pin(address, &bytes, 1U << context->device, operand == 0, context);
    if (!mapping) return FAULT;
    windows[count] = (window_t){.address = address, .end = address + bytes, .mapping = mapping};
    pins->counts[operand]++;
    *end = address + bytes;
    return REACHED;
}

static void unpin(pins_t *pins) {
    for (unsigned operand = 0; operand < SIM_KERNEL_OPERANDS; operand++) {
        for (unsigned i = 0; i < pins->counts[operand]; i++) sim_memory_unpin(pins->windows[operand][i].mapping);
        pins->counts[operand] = 0;
    }
}

/* Pins an operand's elements from `first` on; returns how many of `count` are accessible. */
static uint64_t pin_operand(const sim_context_t *context, const sim_kernel_t *kernel, pins_t *pins, unsigned operand,
                            uint64_t first, uint64_t count, uint64_t output) {
    uint64_t bytes = sim_type_bytes(kernel->operands[operand].type), done = 0;
    while (done < count) {
        uint64_t address = address_of(kernel, operand, first + done, output), end = 0, last_end = 0;
        if (reach(context, pins, operand, address, &end) != REACHED) break;
        if (address + bytes > end && reach(context, pins, operand, address + bytes - 1, &last_end) != REACHED) break;
        uint64_t complete = (end - address) / bytes;
        done += kernel->operands[operand].dense && complete ? complete : 1;
    }
    return done < count ? done : count;
}

static void addresses_of(const sim_kernel_t *kernel, unsigned operand, uint64_t first, size_t count, uint64_t output,
                         uint64_t *addresses) {
    uint64_t bytes = sim_type_bytes(kernel->operands[operand].type);
    uint64_t start = address_of(kernel, operand, first, output);
    if (kernel->operands[operand].dense) {
        for (size_t i = 0; i < count; i++) addresses[i] = start + i * bytes;
        return;
    }
    for (size_t i = 0; i < count; i++) addresses[i] = address_of(kernel, operand, first + i, output);
}

/* Loads an operand's numbers, converted to the computing type. */
static void load(const sim_kernel_t *kernel, unsigned operand, uint64_t first, size_t count, uint64_t output,
                 sim_number_t *numbers) {
    uint64_t addresses[SIM_KERNEL_BATCH];
    addresses_of(kernel, operand, first, count, output, addresses);
    sim_type_load(kernel->operands[operand].type, addresses, count, numbers);
    sim_type_convert(kernel->operands[operand].type, kernel->name.input, count, numbers);
    sim_type_convert(kernel->name.input, kernel->name.compute, count, numbers);
}

static void store(const sim_kernel_t *kernel, uint64_t first, size_t count, sim_number_t *numbers) {
    uint64_t addresses[SIM_KERNEL_BATCH];
    /* The result of a comparison is a truth value; other results have the computing type. */
    sim_type_t from = kernel->name.operation == SIM_COMPARE ? SIM_TYPE_BOOL : kernel->name.compute;
    sim_type_convert(from, kernel->name.output, count, numbers);
    sim_type_convert(kernel->name.output, kernel->operands[0].type, count, numbers);
    addresses_of(kernel, 0, first, count, 0, addresses);
    sim_type_store(kernel->operands[0].type, addresses, count, numbers);
}

static void fill_constant(sim_number_t *numbers, size_t count, sim_number_t constant) {
    for (size_t i = 0; i < count; i++) numbers[i] = constant;
}

static void compute_range(const sim_kernel_t *kernel, uint64_t first, size_t count, sim_number_t *numbers) {
    bool real = sim_type_is_real(kernel->name.compute);
    for (size_t i = 0; i < count; i++) {
        if (real)
            numbers[i].real = kernel->constant.real + kernel->factor.real * (double)(first + i);
        else
            numbers[i].integer =
                (int64_t)((uint64_t)kernel->constant.integer + (uint64_t)kernel->factor.integer * (first + i));
    }
}

/* Computes one batch of at most SIM_KERNEL_BATCH elements. */
static void compute(const sim_kernel_t *kernel, uint64_t first, size_t count) {
    sim_number_t numbers[2][SIM_KERNEL_BATCH];
    unsigned operand = 1;
    if (kernel->name.operation == SIM_RANGE) {
        compute_range(kernel, first, count, numbers[0]);
        return store(kernel, first, count, numbers[0]);
    }
    if (kernel->name.shape == SIM_SHAPE_RANDOM) {
        sim_random_numbers(kernel, first, count, numbers[0]);
        return store(kernel, first, count, numbers[0]);
    }
    for (unsigned i = 0; i < 2; i++) {
        bool constant = kernel->name.constant == (i ? SIM_CONSTANT_SECOND : SIM_CONSTANT_FIRST);
        if (!constant && operand <= kernel->name.inputs)
            load(kernel, operand++, first, count, 0, numbers[i]);
        else
            fill_constant(numbers[i], count, kernel->constant);
    }
    sim_operation_apply(kernel, count, numbers[0], numbers[1]);
    store(kernel, first, count, numbers[0]);
}

/* Populates the pages of `count` adjacent elements of an operand. */
static void populate(const sim_kernel_t *kernel, unsigned operand, uint64_t address, uint64_t count) {
    uint64_t bytes = count * sim_type_bytes(kernel->operands[operand].type);
    if (kernel->operands[operand].dense) sim_memory_populate(address, bytes, operand == 0);
}

/* Computes `count` elements with the lock released. */
static void compute_stretch(const sim_kernel_t *kernel, uint64_t first, uint64_t count, bool dense) {
    pthread_mutex_unlock(&sim_state.lock);
    for (unsigned i = 0; i <= kernel->name.inputs; i++) populate(kernel, i, address_of(kernel, i, first, 0), count);
    if (dense) sim_dense_compute(kernel, first, count);
    for (uint64_t done = 0; done < count && !dense; done += SIM_KERNEL_BATCH)
        compute(kernel, first + done, count - done < SIM_KERNEL_BATCH ? count - done : SIM_KERNEL_BATCH);
    pthread_mutex_lock(&sim_state.lock);
}

static CUresult elementwise_step(const sim_context_t *context, const sim_kernel_t *kernel, progress_t *progress) {
    pins_t pins = {.counts = {0}};
    bool dense = sim_dense_applies(kernel);
    uint64_t left = kernel->count - progress->element, stretch = dense ? DENSE_STRETCH : STRETCH;
    uint64_t count = left < stretch ? left : stretch;
    for (unsigned i = 0; i <= kernel->name.inputs; i++)
        count = pin_operand(context, kernel, &pins, i, progress->element, count, 0);
    if (count) compute_stretch(kernel, progress->element, count, dense);
    unpin(&pins);
    progress->element += count;
    return count ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static void reduce_stretch(const sim_kernel_t *kernel, progress_t *progress, uint64_t count) {
    sim_number_t numbers[SIM_KERNEL_BATCH];
    uint64_t address = address_of(kernel, 1, progress->input, progress->element);
    bool dense = sim_dense_reduces(kernel, address);
    pthread_mutex_unlock(&sim_state.lock);
    populate(kernel, 1, address, count);
    if (dense) progress->total = sim_dense_reduce(kernel, progress->total, address, count);
    for (uint64_t done = 0; done < count && !dense; done += SIM_KERNEL_BATCH) {
        size_t part = count - done < SIM_KERNEL_BATCH ? count - done : SIM_KERNEL_BATCH;
        load(kernel, 1, progress->input + done, part, progress->element, numbers);
        progress->total = sim_operation_combine(kernel, progress->total, numbers, part);
    }
    pthread_mutex_lock(&sim_state.lock);
}

/* Writes the total to its pinned destination. */
static void finish_reduction(const sim_kernel_t *kernel, progress_t *progress) {
    sim_number_t total = progress->total;
    if (kernel->accumulates) {
        sim_number_t before;
        uint64_t address = address_of(kernel, 0, progress->element, 0);
        sim_type_load(kernel->operands[0].type, &address, 1, &before);
        sim_type_convert(kernel->operands[0].type, kernel->name.compute, 1, &before);
        total = sim_operation_combine(kernel, total, &before, 1);
    }
    if (kernel->name.operation == SIM_MEAN) total.real *= kernel->factor.real;
    store(kernel, progress->element, 1, &total);
    progress->element++;
    progress->input = 0;
    progress->total = sim_operation_start(kernel);
}

static CUresult reduction_step(const sim_context_t *context, const sim_kernel_t *kernel, progress_t *progress) {
    pins_t pins = {.counts = {0}};
    uint64_t left = kernel->reduced - progress->input, count = left < STRETCH ? left : STRETCH;
    if (left) count = pin_operand(context, kernel, &pins, 1, progress->input, count, progress->element);
    bool reached = !left || count;
    if (reached && count == left) reached = pin_operand(context, kernel, &pins, 0, progress->element, 1, 0) == 1;
    if (reached && count) reduce_stretch(kernel, progress, count);
    progress->input += count;
    if (reached && progress->input == kernel->reduced) finish_reduction(kernel, progress);
    unpin(&pins);
    return reached ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* Reads the generator's state for this replay. */
static CUresult read_random_state(const sim_context_t *context, sim_kernel_t *kernel) {
    if (!kernel->draw.seed_address) return CUDA_SUCCESS;
    if (!sim_random_read(context, &kernel->draw)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    return CUDA_SUCCESS;
}

CUresult sim_kernel_work(sim_stream_t *stream, const sim_kernel_t *launched) {
    const sim_context_t *context = stream->context;
    sim_kernel_t own = *launched, *kernel = &own; /* a graph replays the original */
    progress_t progress = {.total = sim_operation_start(kernel)};
    CUresult result = CUDA_SUCCESS;
    while (progress.element < kernel->count && result == CUDA_SUCCESS && sim_state_may_continue(stream)) {
        if (sim_state.unmapping) {
            pthread_cond_wait(&sim_state.changed, &sim_state.lock);
            continue;
        }
        bool reduces = kernel->name.shape == SIM_SHAPE_REDUCTION;
        result = read_random_state(context, kernel);
        if (result != CUDA_SUCCESS) break;
        result = reduces ? reduction_step(context, kernel, &progress) : elementwise_step(context, kernel, &progress);
    }
    return result;
}

sim_kernel_t *sim_kernel_retain(sim_kernel_t *kernel) {
    if (kernel) kernel->references++;
    return kernel;
}

void sim_kernel_release(sim_kernel_t *kernel) {
    if (kernel && --kernel->references == 0) free(kernel);
}
