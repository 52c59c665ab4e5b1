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

static tms_status_t pin_pages(tms_host_buffer_t *buffer, const tms_driver_table_t *driver,
                              const tms_error_context_t *context, tms_error_t *error) {
    tms_error_t reason;
    tms_status_t status =
        TMS_DRIVER_CALL(driver, context, &reason, cuMemHostAlloc, &buffer->memory, buffer->bytes, CU_MEMHOSTALLOC_PORTABLE);
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
                                    const tms_driver_table_t *driver, const tms_log_t *log, _Atomic uint64_t *total,
                                    const tms_error_context_t *context, tms_error_t *error) {
    tms_host_buffer_t *made = calloc(1, sizeof *made);
    if (!made) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    *made = (tms_host_buffer_t){.kind = kind, .bytes = bytes, .driver = driver, .log = log, .total = total};
    atomic_init(&made->references, 1);
    tms_status_t status =
        kind == TMS_BACKUP_MMAP ? map_pages(made, context, error) : pin_pages(made, driver, context, error);
    if (status != TMS_OK) {
        free(made);
        return status;
    }
    atomic_fetch_add(total, made->bytes);
    *buffer = made;
    return TMS_OK;
}

void tms_host_buffer_acquire(tms_host_buffer_t *buffer) { atomic_fetch_add(&buffer->references, 1); }

void tms_host_buffer_drop(tms_host_buffer_t *buffer) {
    if (!buffer || atomic_fetch_sub(&buffer->references, 1) != 1) return;
    if (buffer->kind == TMS_BACKUP_MMAP) {
        if (munmap(buffer->memory, buffer->bytes) != 0) {
            tms_log_write(buffer->log, TMS_LOG_ERROR, "munmap of a backup of %llu bytes failed: %s; the memory is lost",
                          (unsigned long long)buffer->bytes, strerror(errno));
        }
    } else {
        CUresult result = buffer->driver->cuMemFreeHost(buffer->memory);
        /* At process exit the driver may be gone, and the memory with it. */
        if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED) {
            const char *name = tms_driver_result_name(buffer->driver, result);
            tms_log_write(buffer->log, TMS_LOG_ERROR,
                          "cuMemFreeHost of a backup of %llu bytes failed with %s (%d); it is lost",
                          (unsigned long long)buffer->bytes, name ? name : "an unknown error", (int)result);
        }
    }
    atomic_fetch_sub(buffer->total, buffer->bytes);
    free(buffer);
}
