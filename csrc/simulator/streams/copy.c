/* Copies and fills: validated at the call, then executed by a stream. */
#include "simulator/streams/copy.h"

#include <signal.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/simulation.h"
#include "simulator/devices/context.h"
#include "simulator/memory/host.h"
#include "simulator/memory/mapping.h"
#include "simulator/streams/entries.h"
#include "simulator/streams/stream.h"
#include "simulator/streams/worker.h"
#include "simulator/work/capture.h"
#include "simulator/work/op.h"

static bool contains(const sim_host_t *host, uint64_t address, uint64_t bytes) {
    return bytes <= host->bytes - (address - host->address);
}

/* A copy's host memory must not overlap device addresses, and must not start in a pinned block and cross its end. */
static bool is_host_range(uint64_t address, uint64_t bytes) {
    const sim_host_t *host = sim_host_at(address);
    if (!address || !sim_memory_unreserved(address, bytes)) return false;
    return !host || contains(host, address, bytes);
}

static bool is_pageable(uint64_t address, uint64_t bytes) {
    const sim_host_t *host = sim_host_at(address);
    return !host || !contains(host, address, bytes);
}

/* With `wait`, returns after completion. Copies of pageable memory always wait; the real driver stages them. */
static CUresult issue(const sim_op_t *op, CUstream handle, bool wait) {
    sim_stream_t *stream = sim_stream_find(handle);
    uint64_t position = 0;
    bool copies = op->kind == SIM_OP_COPY;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!op->bytes) return CUDA_SUCCESS;
    uint64_t written = sim_op_extent(op, op->destination_pitch), read = sim_op_extent(op, op->source_pitch);
    if (!op->destination_on_device && !is_host_range(op->destination, written)) return CUDA_ERROR_INVALID_VALUE;
    if (copies && !op->source_on_device && !is_host_range(op->source, read)) return CUDA_ERROR_INVALID_VALUE;
    /* The driver captures a fill without validation, and validates it when the graph is instantiated. */
    bool later = stream->capture && op->kind == SIM_OP_SET;
    if (!later && !sim_work_reachable(stream->context, op)) return CUDA_ERROR_INVALID_VALUE;
    if (!op->destination_on_device) wait = wait || is_pageable(op->destination, written);
    if (copies && !op->source_on_device) wait = wait || is_pageable(op->source, read);
    CUresult result = sim_stream_submit(stream, op, &position);
    return result == CUDA_SUCCESS && wait && position ? sim_stream_wait(stream, position) : result;
}

/* A synchronous call uses the legacy stream. It does not affect captures of streams that do not synchronise with that
 * stream. */
static CUresult issue_now(const sim_op_t *op) {
    CUresult result = sim_capture_check_legacy(sim_context_current(), false);
    return result == CUDA_SUCCESS ? issue(op, NULL, true) : result;
}

static sim_op_t copy_op(uint64_t destination, bool destination_on_device, uint64_t source, bool source_on_device,
                        uint64_t bytes) {
    return (sim_op_t){.kind = SIM_OP_COPY,
                      .destination = destination,
                      .destination_on_device = destination_on_device,
                      .source = source,
                      .source_on_device = source_on_device,
                      .bytes = bytes};
}

static sim_op_t set_op(uint64_t address, unsigned char value, uint64_t bytes) {
    return (sim_op_t){
        .kind = SIM_OP_SET, .destination = address, .destination_on_device = true, .bytes = bytes, .value = value};
}

/* A host pointer may refer to device memory, because addresses are unified. */
static bool is_device_memory(const void *host) { return sim_memory_mapping_at((uintptr_t)host); }

CUresult sim_copy_dtoh(void *host, CUdeviceptr device, size_t bytes) {
    const sim_op_t op = copy_op((uintptr_t)host, is_device_memory(host), device, true, bytes);
    return issue_now(&op);
}

CUresult sim_copy_htod(CUdeviceptr device, const void *host, size_t bytes) {
    const sim_op_t op = copy_op(device, true, (uintptr_t)host, is_device_memory(host), bytes);
    return issue_now(&op);
}

CUresult sim_copy_dtod(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    const sim_op_t op = copy_op(destination, true, source, true, bytes);
    return issue_now(&op);
}

CUresult sim_copy_dtoh_async(void *host, CUdeviceptr device, size_t bytes, CUstream stream) {
    const sim_op_t op = copy_op((uintptr_t)host, is_device_memory(host), device, true, bytes);
    return issue(&op, stream, false);
}

CUresult sim_copy_htod_async(CUdeviceptr device, const void *host, size_t bytes, CUstream stream) {
    const sim_op_t op = copy_op(device, true, (uintptr_t)host, is_device_memory(host), bytes);
    return issue(&op, stream, false);
}

CUresult sim_copy_dtod_async(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    const sim_op_t op = copy_op(destination, true, source, true, bytes);
    return issue(&op, stream, false);
}

static bool is_without_memory(uint64_t address) {
    return !sim_memory_mapping_at(address) && !sim_memory_unreserved(address, 1);
}

/* Validates the batch attributes: entry i applies to the copies from first[i] to the next entry. */
static bool are_attributes(const sim_copy_attributes_t *attributes, const size_t *first, size_t count, size_t copies) {
    if (!attributes || !first || count == 0 || count > copies || first[0] != 0) return false;
    for (size_t i = 0; i < count; i++) {
        if (attributes[i].source_order < 1 || attributes[i].source_order > SIM_SOURCE_ORDERS) return false;
        if (i > 0 && (first[i] <= first[i - 1] || first[i] >= copies)) return false;
    }
    return true;
}

/* For a reserved address without memory, the driver (580) crashes, and so does this function. */
CUresult sim_copy_batch_async(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                              struct CUmemcpyAttributes_st *attributes, size_t *first_copies, size_t attribute_count,
                              CUstream stream) {
    if (!targets || !sources || !sizes || count == 0 || !stream) return CUDA_ERROR_INVALID_VALUE;
    if (!are_attributes((const sim_copy_attributes_t *)attributes, first_copies, attribute_count, count))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (!targets[i] || !sources[i] || sizes[i] == 0) return CUDA_ERROR_INVALID_VALUE;
        if (is_without_memory(targets[i]) || is_without_memory(sources[i])) raise(SIGSEGV);
    }
    const sim_stream_t *found = sim_stream_find(stream);
    if (found && found->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        const sim_op_t op =
            copy_op(targets[i], sim_memory_mapping_at(targets[i]), sources[i], sim_memory_mapping_at(sources[i]), sizes[i]);
        result = issue(&op, stream, false);
    }
    return result;
}

CUresult sim_copy_set(CUdeviceptr address, unsigned char value, size_t bytes) {
    const sim_op_t op = set_op(address, value, bytes);
    return issue_now(&op);
}

CUresult sim_copy_set_words_async(CUdeviceptr address, unsigned int value, size_t count, CUstream stream) {
    if (address % sizeof value || count > SIZE_MAX / sizeof value) return CUDA_ERROR_INVALID_VALUE;
    sim_op_t op = set_op(address, 0, count * sizeof value);
    op.value = value;
    op.width = sizeof value;
    return issue(&op, stream, false);
}

CUresult sim_copy_write_word(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    (void)flags; /* earlier work of the stream is complete before the write, whatever the flags */
    return sim_copy_set_words_async(address, value, 1, stream);
}

CUresult sim_copy_issue(const sim_op_t *op, CUstream stream, bool now) {
    return now ? issue_now(op) : issue(op, stream, false);
}

CUresult sim_copy_set_async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream) {
    const sim_op_t op = set_op(address, value, bytes);
    return issue(&op, stream, false);
}
