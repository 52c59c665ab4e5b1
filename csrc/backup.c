#include "backup.h"

#include <errno.h>
#include <stdlib.h>

#include "backup_disk_copy.h"

static bool on_host(tms_backup_kind_t kind) { return kind == TMS_BACKUP_PINNED || kind == TMS_BACKUP_MMAP; }

/* ---- what is kept ---- */

static void forget(tms_backup_content_t *content) {
    free(content->extents);
    *content = (tms_backup_content_t){.kind = TMS_BACKUP_NONE};
}

/* Whether the segment at `address` is one of those of which somebody knows what is live. */
static bool is_listed(const tms_live_t *live, uint64_t address) {
    size_t low = 0, high = live->allocation_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (live->allocations[middle] < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < live->allocation_count && live->allocations[low] == address;
}

/* The first range that ends after `address`. */
static size_t first_range(const tms_live_t *live, uint64_t address) {
    size_t low = 0, high = live->range_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (live->ranges[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Cuts a range to what was asked for of the segment [begin, end). Empty where nothing of it is there. */
static tms_live_range_t clip(const tms_live_range_t *range, uint64_t begin, uint64_t end) {
    tms_live_range_t part = {range->begin > begin ? range->begin : begin, range->end < end ? range->end : end};
    if (part.end < part.begin) part.end = part.begin;
    return part;
}

/* Which parts of a segment are live, as extents back to back; touching ones are one. */
static tms_status_t find_extents(const tms_live_t *live, uint64_t address, uint64_t bytes, tms_backup_content_t *content,
                                 const tms_error_context_t *context, tms_error_t *error) {
    size_t first = first_range(live, address), last = first, count = 0;
    while (last < live->range_count && live->ranges[last].begin < address + bytes) last++;
    if (first == last) return TMS_OK; /* nothing is */
    tms_extent_t *extents = calloc(last - first, sizeof *extents);
    if (!extents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    uint64_t packed = 0;
    for (size_t i = first; i < last; i++) {
        tms_live_range_t part = clip(&live->ranges[i], address, address + bytes);
        uint64_t offset = part.begin - address, size = part.end - part.begin;
        if (size == 0) continue;
        if (count > 0 && extents[count - 1].offset + extents[count - 1].bytes == offset)
            extents[count - 1].bytes += size;
        else
            extents[count++] = (tms_extent_t){.offset = offset, .packed = packed, .bytes = size};
        packed += size;
    }
    content->bytes = packed;
    if (packed == 0 || packed == bytes) {
        free(extents);
    } else {
        content->extents = extents;
        content->extent_count = count;
    }
    return TMS_OK;
}

static tms_status_t choose_content(tms_backup_t *backup, const tms_backup_wish_t *wish, tms_backup_content_t *content,
                                   const tms_error_context_t *context, tms_error_t *error) {
    *content = (tms_backup_content_t){.kind = wish->kind};
    if (wish->kind == TMS_BACKUP_NONE) return TMS_OK;
    if (wish->live && is_listed(wish->live, wish->address))
        return find_extents(wish->live, wish->address, backup->bytes, content, context, error);
    content->bytes = backup->bytes;
    return TMS_OK;
}

void *tms_backup_find(const tms_backup_t *backup, uint64_t offset, uint64_t bytes) {
    if (!backup->saved || !backup->host || !on_host(backup->held.kind)) return NULL;
    char *memory = backup->host->memory;
    if (backup->held.bytes == backup->bytes) return memory + offset;
    for (size_t i = 0; i < backup->held.extent_count; i++) {
        const tms_extent_t *extent = &backup->held.extents[i];
        if (offset >= extent->offset && offset - extent->offset <= extent->bytes &&
            bytes <= extent->bytes - (offset - extent->offset))
            return memory + extent->packed + (offset - extent->offset);
    }
    return NULL;
}

/* ---- a pause ---- */

static tms_status_t plan_host(tms_backup_t *backup, const tms_backup_wish_t *wish, uint64_t bytes,
                              const tms_error_context_t *context, tms_error_t *error) {
    if (bytes == 0 || (backup->host && backup->host->bytes >= bytes && backup->host->kind == wish->kind)) return TMS_OK;
    const tms_host_request_t request = {.bytes = bytes, .device = wish->device, .kind = wish->kind, .group = wish->group};
    tms_status_t status = tms_host_batch_add(wish->batch, &request, &backup->fresh, context, error);
    if (status == TMS_OK && wish->policy == TMS_HOST_POOL) atomic_store(&backup->fresh->policy, TMS_HOST_POOL);
    return status;
}

static tms_status_t plan_file(tms_backup_t *backup, tms_backup_stores_t *stores, uint64_t bytes, tms_wait_t *wait,
                              const tms_error_context_t *context, tms_error_t *error) {
    if (bytes == 0 || (backup->file && tms_disk_file_is_usable(backup->file))) return TMS_OK;
    /* A file that was removed, replaced or truncated since the last pause holds nothing that is still needed. */
    tms_disk_file_destroy(&stores->disk, backup->file);
    backup->file = NULL;
    /* Room for everything, whatever is live today: the next pause cannot run out of space. */
    tms_status_t status = tms_disk_file_create(&stores->disk, backup->bytes, &backup->file, wait, context, error);
    backup->fresh_file = status == TMS_OK;
    return status;
}

tms_status_t tms_backup_plan(tms_backup_t *backup, tms_backup_stores_t *stores, const tms_backup_wish_t *wish,
                             const tms_error_context_t *context, tms_error_t *error) {
    tms_backup_content_t content;
    tms_status_t status = choose_content(backup, wish, &content, context, error);
    if (status == TMS_OK && on_host(wish->kind)) status = plan_host(backup, wish, content.bytes, context, error);
    if (status == TMS_OK && wish->kind == TMS_BACKUP_DISK)
        status = plan_file(backup, stores, content.bytes, wish->wait, context, error);
    if (status == TMS_OK)
        backup->planned = content;
    else
        forget(&content);
    return status;
}

/* One step of a copy: `bytes` between the device and the buffer, in parts that end with its pieces. `gathered`: it may be
 * queued together with others. */
typedef tms_status_t (*step_t)(tms_copier_t *copier, char *host, CUdeviceptr address, uint64_t bytes, bool gathered,
                               const tms_error_context_t *context, tms_error_t *error);

static tms_status_t step_to_host(tms_copier_t *copier, char *host, CUdeviceptr address, uint64_t bytes, bool gathered,
                                 const tms_error_context_t *context, tms_error_t *error) {
    return gathered ? tms_copier_part_to_host(copier, host, address, bytes, context, error)
                    : tms_copier_to_host(copier, host, address, bytes, context, error);
}

static tms_status_t step_to_device(tms_copier_t *copier, char *host, CUdeviceptr address, uint64_t bytes, bool gathered,
                                   const tms_error_context_t *context, tms_error_t *error) {
    return gathered ? tms_copier_part_to_device(copier, address, host, bytes, context, error)
                    : tms_copier_to_device(copier, address, host, bytes, context, error);
}

static tms_status_t copy_extents(const tms_backup_content_t *content, tms_host_buffer_t *buffer, step_t step,
                                 tms_copier_t *copier, CUdeviceptr address, const tms_error_context_t *context,
                                 tms_error_t *error) {
    tms_extent_t whole;
    size_t count;
    const tms_extent_t *extents = tms_backup_extents(content, &whole, &count);
    uint64_t usable_until = 0;
    bool gathered = false;
    tms_status_t status = TMS_OK;
    if (content->extents) status = tms_copier_begin_parts(copier, address, context, error);
    for (size_t i = 0; status == TMS_OK && i < count; i++) {
        for (uint64_t part, done = 0; done < extents[i].bytes; done += part) {
            uint64_t packed = extents[i].packed + done, run = usable_until - packed;
            if (packed >= usable_until) {
                status = tms_host_buffer_await(buffer, packed, copier->wait, &run, context, error);
                if (status != TMS_OK) return status;
                usable_until = packed + run;
                /* What the driver does with pageable memory is documented for single copies only. */
                gathered = content->extents && tms_host_buffer_is_pinned(buffer, packed);
            }
            part = extents[i].bytes - done < run ? extents[i].bytes - done : run;
            status = step(copier, (char *)buffer->memory + packed, address + extents[i].offset + done, part, gathered,
                          context, error);
            if (status != TMS_OK) return status;
        }
    }
    return status;
}

tms_status_t tms_backup_save(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error) {
    const tms_backup_content_t *content = &backup->planned;
    if (content->kind == TMS_BACKUP_NONE || content->bytes == 0) return TMS_OK;
    if (content->kind == TMS_BACKUP_DISK) {
        if (backup->held.kind == TMS_BACKUP_DISK) backup->saved = false;
        return tms_disk_copy_save(backup, copier, address, context, error);
    }
    tms_host_buffer_t *buffer = backup->fresh ? backup->fresh : backup->host;
    uint64_t begun = copier->begun;
    tms_status_t status = tms_copier_hold(copier, buffer, context, error);
    if (status == TMS_OK) status = copy_extents(content, buffer, step_to_host, copier, address, context, error);
    /* What a retained buffer held is being written over. */
    if (!backup->fresh && copier->begun != begun) backup->saved = false;
    return status;
}

tms_status_t tms_backup_load(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error) {
    if (!backup->saved || backup->held.bytes == 0) return TMS_OK;
    if (backup->held.kind == TMS_BACKUP_DISK) return tms_disk_copy_load(backup, copier, address, context, error);
    return copy_extents(&backup->held, backup->host, step_to_device, copier, address, context, error);
}

/* ---- ends ---- */

static void drop_host(tms_host_buffer_t **buffer) {
    tms_host_buffer_drop(*buffer);
    *buffer = NULL;
}

static void drop_file(tms_backup_t *backup, tms_backup_stores_t *stores) {
    tms_disk_file_destroy(&stores->disk, backup->file);
    backup->file = NULL;
    backup->fresh_file = false;
}

void tms_backup_cancel(tms_backup_t *backup, tms_backup_stores_t *stores) {
    drop_host(&backup->fresh);
    if (backup->fresh_file) drop_file(backup, stores);
    forget(&backup->planned);
    /* Without contents too a retained buffer stays, at its address. Where the device could not be waited for it may still be
     * written to; the next pause waits for the device before it copies. */
    if (!backup->saved) forget(&backup->held);
}

void tms_backup_commit(tms_backup_t *backup, tms_backup_stores_t *stores) {
    bool to_host = on_host(backup->planned.kind) && backup->planned.bytes > 0;
    if (!to_host || backup->fresh) drop_host(&backup->host);
    if (backup->fresh) backup->host = backup->fresh;
    backup->fresh = NULL;
    if (backup->planned.kind != TMS_BACKUP_DISK && backup->kind != TMS_BACKUP_DISK) drop_file(backup, stores);
    backup->fresh_file = false;
    forget(&backup->held);
    backup->held = backup->planned;
    backup->planned = (tms_backup_content_t){.kind = TMS_BACKUP_NONE};
    backup->saved = backup->held.kind != TMS_BACKUP_NONE;
}

void tms_backup_discard(tms_backup_t *backup, tms_backup_stores_t *stores, tms_host_policy_t policy) {
    if (backup->kind != TMS_BACKUP_DISK) drop_file(backup, stores);
    /* A file stays, so that the next pause cannot run out of space. */
    if (policy == TMS_HOST_RETAIN && backup->saved && backup->held.kind != TMS_BACKUP_DISK) return;
    if (backup->host) atomic_store(&backup->host->policy, policy == TMS_HOST_POOL ? TMS_HOST_POOL : TMS_HOST_RELEASE);
    drop_host(&backup->host);
    forget(&backup->held);
    backup->saved = false;
}

void tms_backup_destroy(tms_backup_t *backup, tms_backup_stores_t *stores) {
    drop_host(&backup->fresh);
    drop_host(&backup->host);
    drop_file(backup, stores);
    forget(&backup->planned);
    forget(&backup->held);
    backup->saved = false;
}
