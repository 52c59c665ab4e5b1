#include "counting.h"

#include "abi/start.h"

/* Set while this thread is inside an interposed call. */
static _Thread_local bool inside_hook;

tms_counting_t tms_counting_begin(const void *caller) {
    tms_counting_t counting = {.state = tms_hook_state(), .caller = caller, .nested = inside_hook};
    inside_hook = true;
    return counting;
}

void tms_counting_end(const tms_counting_t *counting) { inside_hook = counting->nested; }

int tms_counting_device(tms_state_t *state, tms_hook_t hook) {
    int device = TMS_NO_DEVICE;
    if (tms_hook_is_of_driver(hook)) {
        CUdevice current = 0;
        tms_cuCtxGetDevice_t get = TMS_REAL(state, cuCtxGetDevice);
        if (get && get(&current) == CUDA_SUCCESS) device = current;
    } else {
        tms_cudaGetDevice_t get = TMS_REAL(state, cudaGetDevice);
        if (!get || get(&device) != TMS_CUDA_SUCCESS) device = TMS_NO_DEVICE;
    }
    return device;
}

void tms_counting_add(const tms_counting_t *counting, tms_hook_t hook, uint64_t address, uint64_t bytes) {
    tms_ledger_t *ledger = tms_counting_ledger(counting);
    if (!ledger || address == 0) return;
    tms_ledger_add(ledger, counting->caller, tms_counting_device(counting->state, hook), address, bytes);
}

tms_ledger_taken_t tms_counting_take(const tms_counting_t *counting, uint64_t address) {
    tms_ledger_t *ledger = tms_counting_ledger(counting);
    return ledger ? tms_ledger_take(ledger, address) : (tms_ledger_taken_t){TMS_NO_RECORD};
}

void tms_counting_settle(const tms_counting_t *counting, tms_ledger_taken_t taken, bool gone) {
    if (taken.first != TMS_NO_RECORD) tms_ledger_settle(&counting->state->ledger, taken, gone);
}
