#include "simulator/nccl/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { TEXT_BYTES = 512, REFUSED_NAMES = 16 };

static char last_error[TEXT_BYTES];
static _Thread_local const char *current_call = "NCCL";

void sim_nccl_set_call(const char *name) { current_call = name; }

void sim_nccl_set_error(const char *text) { snprintf(last_error, sizeof last_error, "%s", text); }

sim_nccl_result_t sim_nccl_fail(sim_nccl_result_t result, const char *format, ...) {
    va_list arguments;
    int length = snprintf(last_error, sizeof last_error, "%s: ", current_call);
    va_start(arguments, format);
    vsnprintf(last_error + length, sizeof last_error - (size_t)length, format, arguments);
    va_end(arguments);
    return result;
}

sim_nccl_result_t sim_nccl_cuda_failed(CUresult error) {
    return sim_nccl_fail(SIM_NCCL_UNHANDLED_CUDA, "the simulated GPU returned CUDA error %d", (int)error);
}

const char *sim_nccl_last_error(void) {
    static _Thread_local char copy[TEXT_BYTES];
    memcpy(copy, last_error, sizeof copy);
    return copy;
}

const char *sim_nccl_describe(sim_nccl_result_t result) {
    static const char *const texts[SIM_NCCL_RESULTS] = {
        [SIM_NCCL_SUCCESS] = "no error",
        [SIM_NCCL_UNHANDLED_CUDA] = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        [SIM_NCCL_SYSTEM] = "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        [SIM_NCCL_INTERNAL] = "internal error - please report this issue to the NCCL developers",
        [SIM_NCCL_INVALID_ARGUMENT] = "invalid argument (run with NCCL_DEBUG=WARN for details)",
        [SIM_NCCL_INVALID_USAGE] = "invalid usage (run with NCCL_DEBUG=WARN for details)",
        [SIM_NCCL_REMOTE] = "remote process exited or there was a network error",
        [SIM_NCCL_IN_PROGRESS] = "NCCL operation in progress",
    };
    return (unsigned)result < SIM_NCCL_RESULTS ? texts[result] : "unknown result code";
}

sim_nccl_result_t sim_nccl_refuse(const char *name) {
    static const char *named[REFUSED_NAMES];
    for (size_t i = 0; i < REFUSED_NAMES; i++) {
        if (named[i] && strcmp(named[i], name) == 0) break;
        if (named[i]) continue;
        named[i] = name;
        fprintf(stderr, "simulated GPU: %s is not simulated and fails\n", name);
        break;
    }
    return sim_nccl_fail(SIM_NCCL_INVALID_USAGE, "the simulated GPU does not support this function");
}
