#include "count.h"

#include "abi/start.h"

/* Set while this thread is inside an interposed call. */
static _Thread_local bool inside_hook;

tms_count_t tms_count_begin(const void *caller) {
    tms_count_t count = {.state = tms_hook_state(), .caller = caller, .nested = inside_hook};
    inside_hook = true;
    return count;
}

void tms_count_end(const tms_count_t *count) { inside_hook = count->nested; }

int tms_count_device(tms_state_t *state, tms_hook_t hook) {
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

void tms_count_add(const tms_count_t *count, tms_hook_t hook, uint64_t address, uint64_t bytes) {
    tms_ledger_t *ledger = tms_count_ledger(count);
    if (!ledger || address == 0) return;
    tms_ledger_add(ledger, count->caller, tms_count_device(count->state, hook), address, bytes);
}

tms_ledger_taken_t tms_count_take(const tms_count_t *count, uint64_t address) {
    tms_ledger_t *ledger = tms_count_ledger(count);
    return ledger ? tms_ledger_take(ledger, address) : (tms_ledger_taken_t){TMS_NO_RECORD};
}

void tms_count_settle(const tms_count_t *count, tms_ledger_taken_t taken, bool gone) {
    if (taken.first != TMS_NO_RECORD) tms_ledger_settle(&count->state->ledger, taken, gone);
}
