#include "backup_host.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backup.h"

static tms_status_t map_pages(tms_host_buffer_t *buffer, const tms_error_context_t *context, tms_error_t *error) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t bytes = (buffer->bytes + page - 1) / page * page;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return tms_error_set_os(error, context, "mmap", errno, NULL);
    /* A forked child has no use for a copy of tens of GiB, not even a lazy one. Where the kernel refuses, nothing is lost.
     */
    (void)madvise(memory, bytes, MADV_DONTFORK);
    buffer->memory = memory;
    buffer->bytes = bytes;
    return TMS_OK;
}

static tms_status_t pin_pages(tms_host_buffer_t *buffer, const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    tms_error_t reason;
    tms_status_t status = tms_devices_load(buffer->stores->devices, &driver, NULL, context, error);
    if (status == TMS_OK) status = tms_devices_enter(buffer->stores->devices, buffer->device, context, error);
    if (status != TMS_OK) return status;
    status =
        TMS_DRIVER_CALL(driver, context, &reason, cuMemHostAlloc, &buffer->memory, buffer->bytes, CU_MEMHOSTALLOC_PORTABLE);
    tms_devices_leave(buffer->stores->devices, buffer->device);
    /* The driver says "out of memory" for the host's as well, which is another thing to do something about. */
    if (status == TMS_OUT_OF_DEVICE_MEMORY) {
        return tms_driver_explain(
            error, &reason, TMS_OUT_OF_HOST_MEMORY, context,
            "the host cannot pin this much memory. Free host memory, raise the memory limit of the container, or use "
            "cpu_backup_backend=\"mmap\" or a disk backup");
    }
    if (status != TMS_OK && error) *error = reason;
    return status;
}

static tms_quarantine_mask_t give_back(tms_quarantined_t *node);

tms_status_t tms_host_buffer_create(tms_host_buffer_t **buffer, tms_backup_kind_t kind, uint64_t bytes,
                                    struct tms_backup_stores *stores, const tms_error_context_t *context,
                                    tms_error_t *error) {
    tms_host_buffer_t *made = calloc(1, sizeof *made);
    if (!made) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    *made = (tms_host_buffer_t){.quarantined = {.retry = give_back, .holds = TMS_QUARANTINE_BIT(HOST)},
                                .kind = kind,
                                .bytes = bytes,
                                .device = context->device,
                                .process = getpid(),
                                .stores = stores};
    atomic_init(&made->references, 1);
    tms_status_t status = kind == TMS_BACKUP_MMAP ? map_pages(made, context, error) : pin_pages(made, context, error);
    if (status != TMS_OK) {
        free(made);
        return status;
    }
    atomic_fetch_add(&stores->host_bytes, made->bytes);
    *buffer = made;
    return TMS_OK;
}

void tms_host_buffer_acquire(tms_host_buffer_t *buffer) { atomic_fetch_add(&buffer->references, 1); }

static tms_status_t unmap_pages(const tms_host_buffer_t *buffer, const tms_error_context_t *context, tms_error_t *error) {
    if (munmap(buffer->memory, buffer->bytes) == 0) return TMS_OK;
    int os_error = errno;
    /* The system may lack the memory to split a mapping in two. The pages can go all the same; only addresses stay. */
    (void)madvise(buffer->memory, buffer->bytes, MADV_DONTNEED);
    return tms_error_set_os(error, context, "munmap", os_error, NULL);
}

/* The last reference may be a view's, dropped on a thread without a context. */
static tms_status_t unpin_pages(const tms_host_buffer_t *buffer, const tms_error_context_t *context, tms_error_t *error) {
    tms_devices_t *devices = buffer->stores->devices;
    const tms_driver_table_t *driver = NULL;
    tms_status_t status = tms_devices_load(devices, &driver, NULL, context, error);
    if (status == TMS_OK) status = tms_devices_enter(devices, buffer->device, context, error);
    if (status != TMS_OK) return status;
    status = TMS_DRIVER_CALL(driver, context, error, cuMemFreeHost, buffer->memory);
    tms_devices_leave(devices, buffer->device);
    return status;
}

static tms_status_t destroy(tms_host_buffer_t *buffer, tms_error_t *error) {
    tms_error_context_t context = {.operation = "free a backup", .device = buffer->device, .bytes = buffer->bytes};
    tms_status_t status =
        buffer->kind == TMS_BACKUP_MMAP ? unmap_pages(buffer, &context, error) : unpin_pages(buffer, &context, error);
    if (status != TMS_OK && buffer->kind == TMS_BACKUP_PINNED && tms_driver_is_gone(error)) status = TMS_OK;
    if (status == TMS_OK) free(buffer);
    return status;
}

/* A buffer's retry in the quarantine. */
static tms_quarantine_mask_t give_back(tms_quarantined_t *node) {
    tms_host_buffer_t *buffer = (tms_host_buffer_t *)node;
    const tms_log_t *log = buffer->stores->log;
    tms_error_t reason;
    if (destroy(buffer, &reason) == TMS_OK) return 0;
    tms_log_write(log, TMS_LOG_WARNING, "%s It is still kept aside.", reason.message);
    return TMS_QUARANTINE_BIT(HOST);
}

void tms_host_buffer_drop(tms_host_buffer_t *buffer) {
    if (!buffer || atomic_fetch_sub(&buffer->references, 1) != 1) return;
    if (buffer->process != getpid()) {
        free(buffer); /* what it points to belongs to the parent, and something else may be there in this process */
        return;
    }
    struct tms_backup_stores *stores = buffer->stores;
    tms_error_t reason;
    atomic_fetch_sub(&stores->host_bytes, buffer->bytes);
    if (destroy(buffer, &reason) == TMS_OK) return;
    tms_log_write(stores->log, TMS_LOG_ERROR, "%s It is kept aside and tried again by later calls.", reason.message);
    tms_quarantine_add(stores->quarantine, &buffer->quarantined);
}
