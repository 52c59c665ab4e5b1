#include "backup/host/block.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backup/host/gaps.h"
#include "backup/host/node.h"

/* ---- mapping ---- */

static void describe_chunks(struct tms_host_block *block) {
    uint64_t unit = block->store->chunk_bytes;
    for (size_t i = 0; i < block->chunk_count; i++) {
        uint64_t offset = i * unit, rest = block->bytes - offset, bytes = rest < unit ? rest : unit;
        block->chunks[i] = (tms_host_chunk_t){.block = block, .offset = offset, .bytes = bytes, .not_prefaulted = bytes};
    }
}

tms_status_t tms_host_block_map(struct tms_host_block *block, const tms_error_context_t *context, tms_error_t *error) {
    tms_host_store_t *store = block->store;
    tms_error_context_t here = *context;
    here.device = block->device;
    here.bytes = block->bytes;
    /* Whole huge pages: the end of a mapping on small pages would be prefaulted page by page. */
    uint64_t unit = block->bytes < TMS_HOST_HUGE_PAGE_BYTES ? tms_host_page_bytes() : TMS_HOST_HUGE_PAGE_BYTES;
    if (block->bytes > UINT64_MAX - unit) return tms_error_set_os(error, &here, "mmap", ENOMEM, NULL);
    uint64_t bytes = tms_host_round(block->bytes, unit);
    size_t count = (size_t)((bytes + store->chunk_bytes - 1) / store->chunk_bytes);
    tms_host_chunk_t *chunks = calloc(count, sizeof *chunks);
    if (!chunks) return tms_error_set_os(error, &here, "calloc", ENOMEM, NULL);
    char *memory = tms_host_map(bytes);
    if (!memory) {
        int os_error = errno;
        free(chunks);
        return tms_error_set_os(error, &here, "mmap", os_error, NULL);
    }
    tms_host_node_prefer(memory, bytes, tms_host_node(store->devices, block->device, store->limits.root));
    block->memory = memory;
    block->bytes = bytes;
    block->chunks = chunks;
    block->chunk_count = block->left = count;
    describe_chunks(block);
    tms_host_gaps_prepare(block);
    return TMS_OK;
}

void tms_host_block_unmap(struct tms_host_block *block) {
    if (!block->memory) return;
    tms_host_gaps_release(block);
    (void)munmap(block->memory, block->bytes); /* not resident: if this fails, only addresses are leaked */
    free(block->chunks);
    block->memory = NULL;
    block->chunks = NULL;
    block->chunk_count = block->left = 0;
}

void tms_host_block_free(struct tms_host_block *block) {
    if (!block) return;
    tms_host_gaps_release(block);
    free(block->chunks);
    free(block);
}

/* ---- prefaulting ---- */

/* A written byte allocates its page, usually the whole huge page. mincore finds the pages that are still missing. */
static void prefault_part(tms_host_store_t *store, char *begin, uint64_t bytes) {
    enum { MAX_PAGES = TMS_HOST_PREFAULT_BYTES / 4096 };
    unsigned char resident[MAX_PAGES];
    uint64_t page = tms_host_page_bytes();
    size_t pages = (size_t)(bytes / page), missing = 0;
    for (uint64_t at = 0; at < bytes; at += TMS_HOST_HUGE_PAGE_BYTES) ((volatile char *)begin)[at] = 0;
    if (mincore(begin, bytes, resident) != 0) memset(resident, 0, sizeof resident); /* treated as not resident */
    for (size_t i = 0; i < pages; i++) {
        if (resident[i] & 1) continue;
        ((volatile char *)begin)[i * page] = 0;
        missing++;
    }
    if (missing > 0 && bytes >= TMS_HOST_HUGE_PAGE_BYTES)
        tms_log_once(store->log, &store->warned_no_huge_pages, TMS_LOG_INFO,
                     "the system has no or too few huge pages: preparing host memory for backups takes longer. See "
                     "/sys/kernel/mm/transparent_hugepage/enabled");
}

void tms_host_chunk_prefault(tms_host_chunk_t *chunk, uint64_t from, uint64_t bytes) {
    char *begin = chunk->block->memory + chunk->offset + from;
    for (uint64_t part, done = 0; done < bytes; done += part) {
        part = bytes - done < TMS_HOST_PREFAULT_BYTES ? bytes - done : TMS_HOST_PREFAULT_BYTES;
        prefault_part(chunk->block->store, begin + done, part);
    }
}

/* ---- pinning ---- */

tms_status_t tms_host_chunk_pin(tms_host_chunk_t *chunk, const tms_error_context_t *context, tms_error_t *error) {
    struct tms_host_block *block = chunk->block;
    tms_host_store_t *store = block->store;
    const tms_driver_table_t *driver = NULL;
    tms_error_t reason;
    tms_error_context_t here = {.operation = context->operation, .device = block->device, .bytes = chunk->bytes};
    tms_status_t status = tms_devices_load(store->devices, &driver, NULL, &here, &reason);
    if (status == TMS_OK) status = tms_devices_enter(store->devices, block->device, &here, &reason);
    if (status == TMS_OK) {
        status = TMS_DRIVER_CALL(driver, &here, &reason, cuMemHostRegister, block->memory + chunk->offset, chunk->bytes,
                                 CU_MEMHOSTREGISTER_PORTABLE);
        tms_devices_leave(store->devices, block->device);
    }
    chunk->pinned = status == TMS_OK;
    if (status == TMS_OK) return TMS_OK;
    if (tms_driver_is_gone(&reason)) {
        if (error) *error = reason;
        return status;
    }
    tms_host_warn_not_pinned(store, &reason);
    return TMS_OK;
}

/* ---- releasing ---- */

static tms_status_t unpin(tms_host_chunk_t *chunk, const tms_error_context_t *context, tms_error_t *error) {
    struct tms_host_block *block = chunk->block;
    tms_devices_t *devices = block->store->devices;
    const tms_driver_table_t *driver = NULL;
    tms_status_t status = tms_devices_load(devices, &driver, NULL, context, error);
    if (status == TMS_OK) status = tms_devices_enter(devices, block->device, context, error);
    if (status != TMS_OK) return status;
    status = TMS_DRIVER_CALL(driver, context, error, cuMemHostUnregister, block->memory + chunk->offset);
    tms_devices_leave(devices, block->device);
    /* The context was reset or destroyed together with the registration. */
    if (status != TMS_OK && error->driver_result == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) status = TMS_OK;
    return status;
}

tms_status_t tms_host_chunk_give_back(tms_host_chunk_t *chunk, tms_error_t *error) {
    char *memory = chunk->block->memory + chunk->offset;
    tms_error_context_t context = {.operation = "free a backup", .device = chunk->block->device, .bytes = chunk->bytes};
    tms_status_t status = chunk->pinned ? unpin(chunk, &context, error) : TMS_OK;
    if (status != TMS_OK) return tms_driver_is_gone(error) ? TMS_OK : status;
    chunk->pinned = false;
    if (munmap(memory, chunk->bytes) == 0) return TMS_OK;
    int os_error = errno;
    /* The system may lack the memory to split a mapping in two. The pages can still be released; only addresses are
     * leaked. */
    (void)madvise(memory, chunk->bytes, MADV_DONTNEED);
    return tms_error_set_os(error, &context, "munmap", os_error, NULL);
}
