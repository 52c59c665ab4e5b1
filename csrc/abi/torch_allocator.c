/* The entry points for torch.cuda.memory.CUDAPluggableAllocator. torch calls them with its device allocator's mutex held,
 * perhaps with the GIL too, on any thread, and also while the interpreter and the driver shut down. They wait for neither.
 */

#include "abi/start.h"
#include "core/allocation/allocation.h"

/* The driver has shut down before its users, which is how processes end: nothing to tell anybody. */
static bool is_shutdown(tms_status_t status, const tms_error_t *error) {
    return status == TMS_DRIVER_UNAVAILABLE && error->driver_result == CUDA_ERROR_DEINITIALIZED;
}

static void report_failure(const tms_state_t *state, tms_status_t status, const tms_error_t *error) {
    if (is_shutdown(status, error)) return;
    /* torch raises its own error for this one, after it has tried to find memory itself. */
    tms_log_level_t level = status == TMS_OUT_OF_DEVICE_MEMORY ? TMS_LOG_INFO : TMS_LOG_WARNING;
    tms_log_write(&state->log, level, "%s", error->message);
}

void *tms_torch_malloc(ssize_t size, int device, void *stream) {
    (void)stream; /* torch itself keeps apart what different streams use */
    uint64_t address = 0;
    tms_error_t error;
    if (size <= 0) return NULL;
    tms_state_t *state = tms_state(NULL);
    if (!state) return NULL;
    tms_region_t region = tms_saver_settings(&state->saver);
    tms_status_t status = tms_saver_allocate(&state->saver, &region, (uint64_t)size, device, &address, &error);
    if (status != TMS_OK) {
        report_failure(state, status, &error);
        return NULL;
    }
    return (void *)(uintptr_t)address;
}

void tms_torch_free(void *address, ssize_t size, int device, void *stream) {
    (void)size;
    (void)device;
    (void)stream;
    tms_error_t error;
    if (!address) return;
    tms_state_t *state = tms_state(NULL);
    if (!state) return;
    tms_status_t status = tms_saver_free(&state->saver, (uintptr_t)address, &error);
    if (status == TMS_NOT_MANAGED)
        tms_log_write(&state->log, TMS_LOG_WARNING, "free: address %p is not managed; it is left alone", address);
    else if (status != TMS_OK)
        report_failure(state, status, &error);
}
