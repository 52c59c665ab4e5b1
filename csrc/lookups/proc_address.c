/* cuGetProcAddress, by which libraries with the CUDA runtime in them, and the runtime's own library, find the driver's
 * functions. Both of its versions call the driver's first, and change a function that was found only. */
#include "abi/start.h"
#include "counted.h"

/* One look-up as it was asked for. */
typedef struct request {
    tms_state_t *state;
    const void *caller;
    const char *name;
    int version;
    cuuint64_t flags;
} request_t;

/* Asks the driver, by the version of the function that the program has called. */
typedef CUresult (*ask_t)(const request_t *request, const char *name, int version, void **function);

static CUresult ask_first(const request_t *request, const char *name, int version, void **function) {
    CUresult result;
    TMS_CALL_REAL(result, request->state, cuGetProcAddress, name, function, version, request->flags);
    return result;
}

static CUresult ask_second(const request_t *request, const char *name, int version, void **function) {
    CUresult result;
    TMS_CALL_REAL(result, request->state, cuGetProcAddress_v2, name, function, version, request->flags, NULL);
    return result;
}

/* A newer CUDA may give a name to a function with other parameters. That is not counted. */
static bool has_known_parameters(const request_t *request, ask_t ask, const void *found) {
    void *known = NULL;
    if (request->version <= TMS_KNOWN_CUDA) return true;
    return ask(request, request->name, TMS_KNOWN_CUDA, &known) == CUDA_SUCCESS && known == found;
}

static void replace(const request_t *request, ask_t ask, void **function) {
    const int version = request->version < TMS_KNOWN_CUDA ? request->version : TMS_KNOWN_CUDA;
    const bool per_thread = (request->flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    void *query = NULL;
    int hook = tms_counted_name(request->name, version, per_thread);
    if (hook == TMS_NOT_COUNTED || !tms_counted_for(request->state, request->caller)) return;
    if (!has_known_parameters(request, ask, *function)) return;
    void *result = tms_counted_replace(request->state, (tms_hook_t)hook, *function);
    if (result == *function) return;
    *function = result;
    if (ask(request, "cuCtxGetDevice", TMS_KNOWN_CUDA, &query) == CUDA_SUCCESS && query)
        (void)tms_hook_keep(request->state, TMS_HOOK_cuCtxGetDevice, query);
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    const request_t request = {tms_state(NULL), __builtin_return_address(0), symbol, version, flags};
    CUresult result;
    TMS_CALL_REAL(result, request.state, cuGetProcAddress, symbol, function, version, flags);
    if (result == CUDA_SUCCESS && symbol && function && *function) replace(&request, ask_first, function);
    return result;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    const request_t request = {tms_state(NULL), __builtin_return_address(0), symbol, version, flags};
    CUresult result;
    TMS_CALL_REAL(result, request.state, cuGetProcAddress_v2, symbol, function, version, flags, status);
    if (result == CUDA_SUCCESS && symbol && function && *function) replace(&request, ask_second, function);
    return result;
}
