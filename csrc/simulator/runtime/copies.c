/* The runtime's copies and fills, and pointer attributes. */
#include "simulator/base/runtime_types.h"
#include "simulator/base/simulation.h"
#include "simulator/devices/context.h"
#include "simulator/devices/device.h"
#include "simulator/memory/access.h"
#include "simulator/memory/host.h"
#include "simulator/memory/mapping.h"
#include "simulator/runtime/entries.h"
#include "simulator/streams/copy.h"
#include "simulator/streams/entries.h"

enum {
    COPY_HOST_TO_HOST,
    COPY_HOST_TO_DEVICE,
    COPY_DEVICE_TO_HOST,
    COPY_DEVICE_TO_DEVICE,
    COPY_DEFAULT,
    COPY_KINDS,
    ERROR_INVALID_PITCH = 12,          /* cudaErrorInvalidPitchValue */
    ERROR_INVALID_COPY_DIRECTION = 21, /* cudaErrorInvalidMemcpyDirection */
    MEMORY_UNREGISTERED = 0,           /* cudaMemoryType */
    MEMORY_HOST = 1,
    MEMORY_DEVICE = 2,
    NO_DEVICE = -2, /* the device of unregistered memory */
};

/* Copies by cudaMemcpyKind. cudaMemcpyDefault decides by the pointers. */
static CUresult copy_by_kind(sim_op_t *op, int kind, CUstream stream, bool now) {
    if (kind < 0 || kind >= COPY_KINDS) return (CUresult)ERROR_INVALID_COPY_DIRECTION;
    op->kind = SIM_OP_COPY;
    /* A side that the kind places on the device must be there. A side that it places on the host is looked up. */
    bool to_device = kind == COPY_HOST_TO_DEVICE || kind == COPY_DEVICE_TO_DEVICE;
    bool from_device = kind == COPY_DEVICE_TO_HOST || kind == COPY_DEVICE_TO_DEVICE;
    op->destination_on_device = to_device || (kind != COPY_HOST_TO_HOST && sim_memory_reservation_at(op->destination));
    op->source_on_device = from_device || (kind != COPY_HOST_TO_HOST && sim_memory_reservation_at(op->source));
    return sim_copy_issue(op, stream, now);
}

static sim_op_t copy_of(void *destination, const void *source, size_t bytes) {
    return (sim_op_t){.destination = (uintptr_t)destination, .source = (uintptr_t)source, .bytes = bytes};
}

CUresult sim_runtime_copy(void *destination, const void *source, size_t bytes, int kind) {
    sim_op_t op = copy_of(destination, source, bytes);
    return copy_by_kind(&op, kind, NULL, true);
}

CUresult sim_runtime_copy_async(void *destination, const void *source, size_t bytes, int kind, CUstream stream) {
    sim_op_t op = copy_of(destination, source, bytes);
    return copy_by_kind(&op, kind, stream, false);
}

static CUresult copy_rows(void *destination, size_t destination_pitch, const void *source, size_t source_pitch, size_t width,
                          size_t height, int kind, CUstream stream, bool now) {
    sim_op_t op = copy_of(destination, source, width);
    if (!width || !height) return CUDA_SUCCESS;
    if (destination_pitch < width || source_pitch < width) return (CUresult)ERROR_INVALID_PITCH;
    if (destination_pitch > UINT64_MAX / height || source_pitch > UINT64_MAX / height) return CUDA_ERROR_INVALID_VALUE;
    if (destination_pitch == width && source_pitch == width) {
        op.bytes = width * height; /* contiguous */
    } else {
        op.rows = height;
        op.destination_pitch = destination_pitch;
        op.source_pitch = source_pitch;
    }
    return copy_by_kind(&op, kind, stream, now);
}

CUresult sim_runtime_copy_rows(void *destination, size_t destination_pitch, const void *source, size_t source_pitch,
                               size_t width, size_t height, int kind) {
    return copy_rows(destination, destination_pitch, source, source_pitch, width, height, kind, NULL, true);
}

CUresult sim_runtime_copy_rows_async(void *destination, size_t destination_pitch, const void *source, size_t source_pitch,
                                     size_t width, size_t height, int kind, CUstream stream) {
    return copy_rows(destination, destination_pitch, source, source_pitch, width, height, kind, stream, false);
}

static CUresult copy_between(void *destination, int to, const void *source, int from, size_t bytes, CUstream stream) {
    sim_op_t op = copy_of(destination, source, bytes);
    if (!sim_device_valid(to) || !sim_device_valid(from)) return CUDA_ERROR_INVALID_DEVICE;
    op.between_devices = true;
    op.destination_device = to;
    op.source_device = from;
    return copy_by_kind(&op, COPY_DEVICE_TO_DEVICE, stream, false);
}

CUresult sim_runtime_copy_peer(void *destination, int to, const void *source, int from, size_t bytes) {
    return copy_between(destination, to, source, from, bytes, NULL);
}

CUresult sim_runtime_copy_peer_async(void *destination, int to, const void *source, int from, size_t bytes,
                                     CUstream stream) {
    return copy_between(destination, to, source, from, bytes, stream);
}

/* cudaMemset does not wait for the device. */
CUresult sim_runtime_set(void *address, int value, size_t bytes) {
    return sim_copy_set_async((uintptr_t)address, (unsigned char)value, bytes, NULL);
}

CUresult sim_runtime_set_async(void *address, int value, size_t bytes, CUstream stream) {
    return sim_copy_set_async((uintptr_t)address, (unsigned char)value, bytes, stream);
}

CUresult sim_runtime_set_rows_async(void *address, size_t pitch, int value, size_t width, size_t height, CUstream stream) {
    if (!width || !height) return CUDA_SUCCESS;
    if (pitch < width) return (CUresult)ERROR_INVALID_PITCH;
    if (pitch > UINT64_MAX / height) return CUDA_ERROR_INVALID_VALUE;
    const sim_op_t op = {.kind = SIM_OP_SET,
                         .destination = (uintptr_t)address,
                         .destination_on_device = true,
                         .bytes = width,
                         .rows = height,
                         .destination_pitch = pitch,
                         .value = (unsigned char)value};
    return sim_copy_issue(&op, stream, false);
}

CUresult sim_runtime_set_rows(void *address, size_t pitch, int value, size_t width, size_t height) {
    return sim_runtime_set_rows_async(address, pitch, value, width, height, NULL);
}

CUresult sim_runtime_pointer_attributes(sim_pointer_attributes_t *attributes, const void *address) {
    const sim_mapping_t *mapping = sim_memory_mapping_at((uintptr_t)address);
    const sim_host_t *host = sim_host_at((uintptr_t)address);
    if (!attributes) return CUDA_ERROR_INVALID_VALUE;
    *attributes = (sim_pointer_attributes_t){.type = MEMORY_UNREGISTERED, .device = NO_DEVICE};
    if (mapping) {
        attributes->type = MEMORY_DEVICE;
        attributes->device = mapping->physical->device;
        /* Memory that this device cannot access has an owner but no device pointer. */
        const sim_context_t *context = sim_context_current();
        if (sim_memory_reachable((uintptr_t)address, 1, 1U << context->device, false, context))
            attributes->device_pointer = (void *)(uintptr_t)address;
    } else if (host) {
        attributes->type = MEMORY_HOST;
        attributes->device = host->context->device;
        attributes->device_pointer = attributes->host_pointer = (void *)(uintptr_t)address;
    } else {
        attributes->host_pointer = (void *)(uintptr_t)address; /* unknown to the runtime */
    }
    return CUDA_SUCCESS;
}
