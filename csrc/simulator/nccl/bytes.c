#include "simulator/nccl/bytes.h"

#include <string.h>

#include "simulator/memory/host.h"
#include "simulator/memory/touch.h"

static void touch(uint64_t address, void *into, const void *from, uint64_t bytes) {
    pthread_mutex_unlock(&sim_state.lock);
    void *memory = (void *)(uintptr_t)address;
    sim_memory_populate(address, bytes, from != NULL);
    memcpy(into ? into : memory, from ? from : memory, bytes);
    pthread_mutex_lock(&sim_state.lock);
}

/* Copies from `from`, or into `into`; the other is NULL. */
static CUresult move(const sim_stream_t *stream, uint64_t address, uint8_t *into, const uint8_t *from, uint64_t bytes) {
    while (bytes && sim_state_may_continue(stream)) {
        uint64_t part = bytes < SIM_CHUNK_BYTES ? bytes : SIM_CHUNK_BYTES;
        if (sim_state.unmapping) {
            pthread_cond_wait(&sim_state.changed, &sim_state.lock);
            continue;
        }
        const sim_host_t *host = sim_host_at(address);
        if (host) { /* pinned host memory stays mapped until the stream's work is done */
            uint64_t left = host->bytes - (address - host->address);
            part = part < left ? part : left;
            touch(address, into, from, part);
        } else {
            sim_mapping_t *mapping =
                sim_memory_pin(address, &part, 1U << stream->context->device, from != NULL, stream->context);
            if (!mapping) return CUDA_ERROR_ILLEGAL_ADDRESS;
            touch(address, into, from, part);
            sim_memory_unpin(mapping);
        }
        address += part;
        bytes -= part;
        if (into) into += part;
        if (from) from += part;
    }
    return CUDA_SUCCESS;
}

CUresult sim_nccl_read(const sim_stream_t *stream, uint64_t address, void *buffer, uint64_t bytes) {
    return move(stream, address, buffer, NULL, bytes);
}

CUresult sim_nccl_write(const sim_stream_t *stream, uint64_t address, const void *buffer, uint64_t bytes) {
    return move(stream, address, NULL, buffer, bytes);
}
