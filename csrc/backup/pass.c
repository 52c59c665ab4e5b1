#include "backup/pass.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backup/host/batch.h"

/* Logs why there are no fingerprints. */
static void log_failure(const tms_pass_t *pass, const tms_error_t *reason) {
    static const struct {
        tms_log_cause_t cause;
        const char *consequence;
    } by_purpose[] = {
        [TMS_PASS_COMPARES] = {TMS_LOG_NOT_COMPARED,
                               "All contents are copied, because it is not known which ones have changed."},
        [TMS_PASS_VERIFIES] = {TMS_LOG_NOT_VERIFIED, "The restored contents are not checked."},
        [TMS_PASS_NAMES] = {TMS_LOG_NOT_NAMED, "The call fails, because objects are named by their fingerprints."},
    };
    tms_log_recurring(pass->stores->copying.log, by_purpose[pass->purpose].cause, TMS_LOG_WARNING, reason,
                      by_purpose[pass->purpose].consequence);
}

static void log_lack_of_memory(const tms_pass_t *pass, int device, const char *call) {
    const tms_error_context_t context = {.operation = pass->operation, .device = device};
    tms_error_t reason;
    (void)tms_error_set_os(&reason, &context, call, ENOMEM, NULL);
    log_failure(pass, &reason);
}

void tms_pass_add(tms_pass_t *pass, tms_backup_t *backup, const tms_backup_content_t *content, CUdeviceptr address,
                  int device) {
    enum { FIRST_CAPACITY = 16 };
    if (pass->count == pass->capacity) {
        const size_t capacity = pass->capacity ? 2 * pass->capacity : FIRST_CAPACITY;
        tms_pass_part_t *grown = realloc(pass->parts, capacity * sizeof *grown);
        if (!grown) {
            log_lack_of_memory(pass, device, "realloc");
            return;
        }
        pass->parts = grown;
        pass->capacity = capacity;
    }
    if (!pass->kernels[device]) pass->kernels[device] = calloc(1, sizeof *pass->kernels[device]);
    tms_pass_kernel_t *kernel = pass->kernels[device];
    if (!kernel) {
        log_lack_of_memory(pass, device, "calloc");
        return;
    }
    pass->parts[pass->count++] = (tms_pass_part_t){
        .backup = backup, .content = content, .address = address, .device = device, .first = kernel->chunks};
    kernel->chunks += tms_fingerprints_count(content);
}

/* ---- the start ---- */

/* The buffer of a kernel has the chunks, and then the results. It returns to the pool of host memory, so that not each
 * pause maps and pins one. */
static tms_fingerprint_chunk_t *chunks_of(const tms_pass_kernel_t *kernel) { return kernel->buffer->memory; }
static tms_fingerprint_t *results_of(const tms_pass_kernel_t *kernel) {
    return (tms_fingerprint_t *)(void *)(chunks_of(kernel) + kernel->chunks);
}

static tms_status_t make_buffer(const tms_pass_t *pass, tms_pass_kernel_t *kernel, int device,
                                const tms_error_context_t *context, tms_error_t *error) {
    struct tms_host_batch *batch = NULL;
    const tms_host_request_t wanted = {.bytes =
                                           kernel->chunks * (sizeof(tms_fingerprint_chunk_t) + sizeof(tms_fingerprint_t)),
                                       .device = device,
                                       .kind = TMS_BACKUP_PINNED,
                                       .group = kernel};
    tms_status_t status = tms_host_batch_create(&batch, &pass->stores->host, context, error);
    if (status == TMS_OK) status = tms_host_batch_add(batch, &wanted, &kernel->buffer, context, error);
    if (status == TMS_OK) status = tms_host_batch_start(batch, context, error);
    for (uint64_t part, done = 0; status == TMS_OK && done < wanted.bytes; done += part) {
        status = tms_host_buffer_await(kernel->buffer, done, pass->wait, &part, context, error);
        if (status == TMS_OK && !tms_host_buffer_is_pinned(kernel->buffer, done))
            status = tms_error_set(error, TMS_OUT_OF_HOST_MEMORY, context, "memory for fingerprints could not be pinned");
    }
    if (status == TMS_OK) atomic_store(&kernel->buffer->policy, TMS_HOST_POOL);
    tms_host_batch_destroy(batch);
    return status;
}

/* Writes the chunks of a segment, if its memory is mapped: a kernel that reads other memory would end the context. The
 * kernel reads whole vectors. The bytes that this adds are the segment's as well, because its memory is a multiple of a
 * page. */
static tms_status_t write_chunks(const tms_pass_t *pass, const tms_pass_part_t *part, const tms_pass_kernel_t *kernel,
                                 const tms_error_context_t *context, tms_error_t *error) {
    static const uint64_t vector = TMS_FINGERPRINT_VECTOR_BYTES;
    const CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = part->device};
    unsigned long long access = 0;
    tms_extent_t whole, chunk;
    size_t count;
    const tms_extent_t *extents = tms_backup_extents(part->content, &whole, &count);
    tms_fingerprint_chunk_t *next = chunks_of(kernel) + part->first;
    tms_status_t status = TMS_OK;
    if (pass->purpose != TMS_PASS_NAMES) /* the driver can say so only of memory that was mapped by cuMemMap */
        status = TMS_DRIVER_CALL(kernel->copier.driver, context, error, cuMemGetAccess, &access, &here, part->address);
    for (size_t i = 0; status == TMS_OK && i < count; i++) {
        for (uint64_t done = 0; done < extents[i].bytes; done += chunk.bytes) {
            chunk = tms_fingerprints_chunk(&extents[i], done);
            const uint64_t begin = (part->address + chunk.offset) / vector * vector;
            const uint64_t end = (part->address + chunk.offset + chunk.bytes + vector - 1) / vector * vector;
            *next++ = (tms_fingerprint_chunk_t){.address = begin, .bytes = end - begin};
        }
    }
    return status;
}

static void drop_buffer(void *buffer) { tms_host_buffer_drop(buffer); }

/* Makes the buffer, and queues the kernel in the copier's stream. */
static tms_status_t queue_kernel(const tms_pass_t *pass, tms_pass_kernel_t *kernel, int device,
                                 const tms_error_context_t *context, tms_error_t *error) {
    tms_copier_t *copier = &kernel->copier;
    tms_status_t status = make_buffer(pass, kernel, device, context, error);
    if (status == TMS_OK) status = tms_copier_hold(copier, kernel->buffer, drop_buffer, context, error);
    if (status == TMS_OK) tms_host_buffer_acquire(kernel->buffer);
    /* The buffer may hold the results of an earlier pass. Zeros are results that the kernel has not written. */
    if (status == TMS_OK) memset(results_of(kernel), 0, kernel->chunks * sizeof(tms_fingerprint_t));
    for (size_t i = 0; status == TMS_OK && i < pass->count; i++) {
        if (pass->parts[i].device == device) status = write_chunks(pass, &pass->parts[i], kernel, context, error);
    }
    if (status != TMS_OK) return status;
    copier->idle = false;
    return tms_fingerprinter_launch(&pass->stores->fingerprinter, copier->driver, device, copier->stream, chunks_of(kernel),
                                    (uint32_t)kernel->chunks, results_of(kernel), context, error);
}

static void start_kernel(const tms_pass_t *pass, tms_pass_kernel_t *kernel, int device) {
    const tms_error_context_t context = {.operation = pass->operation, .device = device};
    tms_error_t reason;
    tms_status_t status = tms_copier_open(&kernel->copier, &pass->stores->copying, device, NULL, &context, &reason);
    if (status == TMS_OK) {
        status = queue_kernel(pass, kernel, device, &context, &reason);
        if (status == TMS_OK)
            tms_copier_step_out(&kernel->copier);
        else if (status == TMS_FORKED)
            kernel->copier.open = false; /* in a forked child: the stream and its context belong to the parent */
        else
            (void)tms_copier_close(&kernel->copier);
    }
    if (status != TMS_OK && status != TMS_INTERRUPTED && status != TMS_FORKED) log_failure(pass, &reason);
}

void tms_pass_start(tms_pass_t *pass) {
    for (int device = 0; device < TMS_MAX_DEVICES; device++) {
        tms_pass_kernel_t *kernel = pass->kernels[device];
        if (kernel && kernel->chunks > 0 && kernel->chunks <= UINT32_MAX) start_kernel(pass, kernel, device);
    }
}

/* ---- the end ---- */

static bool are_written(const tms_fingerprint_t *results, uint64_t count) {
    static const tms_fingerprint_t unwritten = {.words = {0}};
    for (uint64_t i = 0; i < count; i++) {
        if (memcmp(&results[i], &unwritten, sizeof unwritten) == 0) return false;
    }
    return true;
}

/* If the kernel has not written all of the results, or memory is short, the backup gets none. */
static void give_fingerprints(const tms_pass_t *pass, const tms_pass_part_t *part, const tms_pass_kernel_t *kernel) {
    const tms_error_context_t context = {.operation = pass->operation, .device = part->device, .address = part->address};
    const tms_fingerprint_t *results = results_of(kernel) + part->first;
    const uint64_t count = tms_fingerprints_count(part->content);
    tms_error_t reason;
    if (!are_written(results, count)) {
        (void)tms_error_set(&reason, TMS_DRIVER, &context, "the kernel that computes fingerprints ended without a result");
        log_failure(pass, &reason);
    } else if (!tms_fingerprints_renew(&part->backup->fingerprints, results, count, pass->stores->fingerprinter.keys)) {
        log_lack_of_memory(pass, part->device, "malloc");
    }
}

static tms_status_t finish_kernel(tms_pass_t *pass, tms_pass_kernel_t *kernel, int device, tms_error_t *error) {
    const tms_error_context_t context = {.operation = pass->operation, .device = device};
    if (!kernel->copier.open) return TMS_OK;
    tms_status_t status = tms_copier_step_in(&kernel->copier, &context, error);
    if (status == TMS_OK) status = tms_copier_wait(&kernel->copier, &context, error);
    for (size_t i = 0; status == TMS_OK && i < pass->count; i++) {
        if (pass->parts[i].device == device) give_fingerprints(pass, &pass->parts[i], kernel);
    }
    /* The copier keeps the buffer if the kernel may still be running. */
    if (!tms_copier_close(&kernel->copier)) pass->busy |= (tms_device_mask_t)1 << device;
    return status;
}

tms_status_t tms_pass_finish(tms_pass_t *pass, tms_error_t *error) {
    tms_status_t first = TMS_OK;
    for (int device = 0; device < TMS_MAX_DEVICES; device++) {
        tms_pass_kernel_t *kernel = pass->kernels[device];
        if (!kernel) continue;
        tms_status_t status = finish_kernel(pass, kernel, device, first == TMS_OK ? error : NULL);
        if (first == TMS_OK) first = status;
        tms_host_buffer_drop(kernel->buffer);
        free(kernel);
        pass->kernels[device] = NULL;
    }
    free(pass->parts);
    pass->parts = NULL;
    pass->count = pass->capacity = 0;
    return first;
}

tms_status_t tms_pass_perform(tms_pass_t *pass, tms_error_t *error) {
    const tms_error_context_t context = {.operation = pass->operation, .device = TMS_NO_DEVICE};
    if (pass->count == 0) return tms_pass_finish(pass, error);
    tms_pass_start(pass);
    tms_status_t status = tms_wait_check(pass->wait, &context, error);
    if (status == TMS_FORKED) return status;
    tms_status_t finished = tms_pass_finish(pass, status == TMS_OK ? error : NULL);
    return status == TMS_OK ? finished : status;
}
