#include "backup_host.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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
    tms_status_t status = tms_devices_load(buffer->devices, &driver, NULL, context, error);
    if (status == TMS_OK) status = tms_devices_enter(buffer->devices, buffer->device, context, error);
    if (status != TMS_OK) return status;
    status =
        TMS_DRIVER_CALL(driver, context, &reason, cuMemHostAlloc, &buffer->memory, buffer->bytes, CU_MEMHOSTALLOC_PORTABLE);
    tms_devices_leave(buffer->devices, buffer->device);
    /* The driver says "out of memory" for the host's as well, which is another thing to do something about. */
    if (status == TMS_OUT_OF_DEVICE_MEMORY) {
        return tms_error_set(
            error, TMS_OUT_OF_HOST_MEMORY, context,
            "cuMemHostAlloc failed with %s: the host cannot pin this much memory. Free host memory, raise the "
            "memory limit of the container, or use cpu_backup_backend=\"mmap\" or a disk backup",
            reason.result_name);
    }
    if (status != TMS_OK && error) *error = reason;
    return status;
}

tms_status_t tms_host_buffer_create(tms_host_buffer_t **buffer, tms_backup_kind_t kind, uint64_t bytes,
                                    tms_devices_t *devices, const tms_log_t *log, _Atomic uint64_t *total,
                                    const tms_error_context_t *context, tms_error_t *error) {
    tms_host_buffer_t *made = calloc(1, sizeof *made);
    if (!made) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    *made = (tms_host_buffer_t){
        .kind = kind, .bytes = bytes, .devices = devices, .device = context->device, .log = log, .total = total};
    atomic_init(&made->references, 1);
    tms_status_t status = kind == TMS_BACKUP_MMAP ? map_pages(made, context, error) : pin_pages(made, context, error);
    if (status != TMS_OK) {
        free(made);
        return status;
    }
    atomic_fetch_add(total, made->bytes);
    *buffer = made;
    return TMS_OK;
}

void tms_host_buffer_acquire(tms_host_buffer_t *buffer) { atomic_fetch_add(&buffer->references, 1); }

static void unmap_pages(tms_host_buffer_t *buffer) {
    if (munmap(buffer->memory, buffer->bytes) == 0) return;
    tms_log_write(buffer->log, TMS_LOG_ERROR, "munmap of a backup of %llu bytes failed: %s; the memory is lost",
                  (unsigned long long)buffer->bytes, strerror(errno));
}

/* The last reference may be a view's, dropped on a thread without a context. */
static void unpin_pages(tms_host_buffer_t *buffer) {
    tms_error_context_t context = {.operation = "free a backup", .device = buffer->device, .bytes = buffer->bytes};
    const tms_driver_table_t *driver = NULL;
    tms_error_t error;
    tms_status_t status = tms_devices_load(buffer->devices, &driver, NULL, &context, &error);
    if (status == TMS_OK) status = tms_devices_enter(buffer->devices, buffer->device, &context, &error);
    if (status == TMS_OK) {
        status = TMS_DRIVER_CALL(driver, &context, &error, cuMemFreeHost, buffer->memory);
        tms_devices_leave(buffer->devices, buffer->device);
    }
    /* At process exit the driver may be gone, and the memory with it. */
    if (status != TMS_OK && status != TMS_DRIVER_UNAVAILABLE)
        tms_log_write(buffer->log, TMS_LOG_ERROR, "%s The memory is lost.", error.message);
}

void tms_host_buffer_drop(tms_host_buffer_t *buffer) {
    if (!buffer || atomic_fetch_sub(&buffer->references, 1) != 1) return;
    atomic_fetch_sub(buffer->total, buffer->bytes);
    if (buffer->kind == TMS_BACKUP_MMAP)
        unmap_pages(buffer);
    else
        unpin_pages(buffer);
    free(buffer);
}
