/* The entry points for torch.cuda.memory.CUDAPluggableAllocator. torch calls them on any thread, with its device allocator's
 * mutex held, perhaps with the GIL too, and also while the interpreter and the driver shut down. They acquire neither lock.
 */

#include "abi/ordinary_memory.h"
#include "abi/start.h"
#include "core/allocation/allocation.h"
#include "core/allocation/free.h"
#include "core/model/peers.h"

/* Whether the driver has shut down, which is normal at process exit and not reported. */
static bool is_shutdown(tms_status_t status, const tms_error_t *error) {
    return status == TMS_DRIVER_UNAVAILABLE && error->driver_result == CUDA_ERROR_DEINITIALIZED;
}

static void report_failure(tms_state_t *state, tms_status_t status, const tms_error_t *error) {
    if (is_shutdown(status, error)) return;
    /* torch's own error shows the free memory, but does not mention the margin. */
    const bool refused = status == TMS_OUT_OF_DEVICE_MEMORY && !error->call[0];
    if (refused && atomic_load(&state->saver.memory_margin_bytes) > 0 && !atomic_exchange(&state->warned_refusal, true)) {
        tms_log_write(&state->log, TMS_LOG_WARNING,
                      "%s PyTorch may release cached memory and try again; otherwise it raises its own out-of-memory error. "
                      "(Logged once.)",
                      error->message);
        return;
    }
    /* torch first frees cached memory and retries, and then raises its own error. */
    tms_log_level_t level = status == TMS_OUT_OF_DEVICE_MEMORY ? TMS_LOG_INFO : TMS_LOG_WARNING;
    tms_log_write(&state->log, level, "%s", error->message);
}

/* The package routes pools to this allocator only inside a region. So this pool was made by the program itself. */
static void warn_outside_regions(tms_state_t *state, const tms_region_t *region, ssize_t size) {
    int depth = 0;
    (void)tms_region_current(state->saver.regions, &depth);
    if (region->managed || depth > 0) return;
    tms_log_once(
        &state->log, &state->warned_pool_use, TMS_LOG_WARNING,
        "PyTorch has allocated %zd bytes from a MemPool with this package's allocator outside every region. They are "
        "managed with the tag '%s' and without a backup, and PyTorch may hand out free blocks of the pool while they "
        "are paused. Use region() in place of the pool, or pass the pool's id to cuda_graph(). (Logged once.)",
        size, region->tag->name);
}

static void *allocate_managed(tms_state_t *state, const tms_region_t *region, ssize_t size, int device) {
    uint64_t address = 0;
    tms_error_t error;
    tms_status_t status = tms_allocation_create(&state->saver, region, (uint64_t)size, device, &address, &error);
    if (status == TMS_OK) return (void *)(uintptr_t)address;
    report_failure(state, status, &error);
    return NULL;
}

static void *allocate_ordinary(tms_state_t *state, ssize_t size, int device) {
    uint64_t address = 0;
    tms_error_t error;
    tms_status_t status = tms_ordinary_allocate(state, (uint64_t)size, device, &address, &error);
    if (status == TMS_OK) {
        tms_peers_refresh_after_allocation(&state->saver);
        return (void *)(uintptr_t)address;
    }
    report_failure(state, status, &error);
    return NULL;
}

void *tms_torch_malloc(ssize_t size, int device, void *stream) {
    /* torch itself separates memory by stream */
    tms_state_t *state = size > 0 ? tms_state(NULL) : NULL;
    if (!state) return NULL;
    if (state->config.disable) return tms_torch_ordinary_malloc(size, device, stream);
    const tms_region_t region = tms_saver_settings(&state->saver);
    void *address = allocate_managed(state, &region, size, device);
    if (!address) return NULL;
    warn_outside_regions(state, &region, size);
    tms_late_devices_notify(&state->late_devices, device);
    return address;
}

void tms_torch_free(void *address, ssize_t size, int device, void *stream) {
    tms_error_t error;
    if (!address) return;
    tms_state_t *state = tms_state(NULL);
    if (!state) return;
    if (state->config.disable) {
        tms_torch_default_free(address, size, device, stream);
        return;
    }
    tms_status_t status = tms_free_address(&state->saver, (uintptr_t)address, &error);
    if (status == TMS_NOT_MANAGED)
        tms_log_write(&state->log, TMS_LOG_WARNING, "free: address %p is not managed and is ignored", address);
    else if (status != TMS_OK)
        report_failure(state, status, &error);
}

/* ---- memory outside regions ---- */

void *tms_torch_ordinary_malloc(ssize_t size, int device, void *stream) {
    (void)stream;
    tms_state_t *state = size > 0 ? tms_state(NULL) : NULL;
    void *address = state ? allocate_ordinary(state, size, device) : NULL;
    if (address) tms_late_devices_notify(&state->late_devices, device);
    return address;
}

void *tms_torch_default_malloc(ssize_t size, int device, void *stream) {
    (void)stream;
    tms_state_t *state = size > 0 ? tms_state(NULL) : NULL;
    if (!state) return NULL;
    /* The settings of a capture do not apply: they are for the pool of its graph. */
    const tms_region_t region = tms_region_current(&state->regions, NULL);
    return region.managed ? allocate_managed(state, &region, size, device) : allocate_ordinary(state, size, device);
}

void tms_torch_default_free(void *address, ssize_t size, int device, void *stream) {
    (void)size;
    (void)stream;
    tms_error_t error;
    tms_state_t *state = address ? tms_state(NULL) : NULL;
    if (!state) return;
    tms_status_t status = tms_free_address(&state->saver, (uintptr_t)address, &error);
    if (status == TMS_NOT_MANAGED) status = tms_ordinary_free(state, (uintptr_t)address, device, &error);
    if (status != TMS_OK) report_failure(state, status, &error);
}
