#include "counted.h"

#include <string.h>
#include <sys/stat.h>

#include "abi/start.h"
#include "base/callers.h"
#include "preload/hooks.h"

static const char driver_prefix[] = "libcuda.so";

typedef struct interposer {
    const char *symbol;
    void *function;
} interposer_t;

/* The interposers are in the order of tms_hook_t, starting at FIRST. */
enum { FIRST = TMS_HOOK_cuGetProcAddress };
static const interposer_t interposers[] = {
#define INTERPOSER(name, parameters) {#name, (void *)name},
    TMS_DRIVER_LOOKUPS(INTERPOSER) TMS_DRIVER_HOOKS(INTERPOSER)
#undef INTERPOSER
};
enum { INTERPOSER_COUNT = sizeof(interposers) / sizeof(interposers[0]) };
_Static_assert((int)INTERPOSER_COUNT == (int)TMS_HOOK_COUNT - (int)FIRST,
               "the interposers of the driver are the last hooks");

/* ---- names ---- */

TMS_LOOKUPS_EARLY static bool is_same(const char *left, const char *right) {
    while (*left && *left == *right) {
        left++;
        right++;
    }
    return *left == *right;
}

TMS_LOOKUPS_EARLY int tms_counted_symbol(const char *symbol) {
    if (symbol[0] != 'c' || symbol[1] != 'u') return TMS_NOT_COUNTED;
    for (int i = 0; i < INTERPOSER_COUNT; i++) {
        if (is_same(symbol, interposers[i].symbol)) return FIRST + i;
    }
    return TMS_NOT_COUNTED;
}

/* The version of CUDA since which a name means the symbol. If a name has several rows, the newest comes first. */
typedef struct procedure {
    const char *name;
    int since;
    tms_hook_t hook, per_thread;
} procedure_t;

enum { CUDA_3_2 = 3020, CUDA_10_2 = 10020, CUDA_11 = 11000, CUDA_11_2 = 11020, CUDA_11_3 = 11030, CUDA_12 = 12000 };

/* Up to this version of CUDA the parameters of every counted function are those of preload/resolve.h. */
enum { KNOWN_CUDA = 13000 };

static const procedure_t procedures[] = {
    {"cuMemAlloc", CUDA_3_2, TMS_HOOK_cuMemAlloc_v2, TMS_HOOK_cuMemAlloc_v2},
    {"cuMemAllocPitch", CUDA_3_2, TMS_HOOK_cuMemAllocPitch_v2, TMS_HOOK_cuMemAllocPitch_v2},
    {"cuMemFree", CUDA_3_2, TMS_HOOK_cuMemFree_v2, TMS_HOOK_cuMemFree_v2},
    {"cuMemAllocAsync", CUDA_11_2, TMS_HOOK_cuMemAllocAsync, TMS_HOOK_cuMemAllocAsync_ptsz},
    {"cuMemAllocFromPoolAsync", CUDA_11_2, TMS_HOOK_cuMemAllocFromPoolAsync, TMS_HOOK_cuMemAllocFromPoolAsync_ptsz},
    {"cuMemFreeAsync", CUDA_11_2, TMS_HOOK_cuMemFreeAsync, TMS_HOOK_cuMemFreeAsync_ptsz},
    {"cuMemCreate", CUDA_10_2, TMS_HOOK_cuMemCreate, TMS_HOOK_cuMemCreate},
    {"cuMemRelease", CUDA_10_2, TMS_HOOK_cuMemRelease, TMS_HOOK_cuMemRelease},
    {"cuMemRetainAllocationHandle", CUDA_11, TMS_HOOK_cuMemRetainAllocationHandle, TMS_HOOK_cuMemRetainAllocationHandle},
    {"cuMemMap", CUDA_10_2, TMS_HOOK_cuMemMap, TMS_HOOK_cuMemMap},
    {"cuMemUnmap", CUDA_10_2, TMS_HOOK_cuMemUnmap, TMS_HOOK_cuMemUnmap},
    {"cuGetProcAddress", CUDA_12, TMS_HOOK_cuGetProcAddress_v2, TMS_HOOK_cuGetProcAddress_v2},
    {"cuGetProcAddress", CUDA_11_3, TMS_HOOK_cuGetProcAddress, TMS_HOOK_cuGetProcAddress},
};

/* Returns the hook of the function that cuGetProcAddress finds for a name without its version, or TMS_NOT_COUNTED.
 * `cuda_version` is the requested version, but at most KNOWN_CUDA. */
static int find_procedure(const char *name, int cuda_version, bool per_thread) {
    for (size_t i = 0; i < sizeof(procedures) / sizeof(procedures[0]); i++) {
        const procedure_t *procedure = &procedures[i];
        if (cuda_version >= procedure->since && strcmp(name, procedure->name) == 0)
            return (int)(per_thread ? procedure->per_thread : procedure->hook);
    }
    return TMS_NOT_COUNTED;
}

/* ---- libraries ---- */

static const char *base_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Compares files and not paths, because the simulated GPU is loaded under several names. */
static bool is_same_file(const char *path, const char *other) {
    struct stat left, right;
    return stat(path, &left) == 0 && stat(other, &right) == 0 && left.st_dev == right.st_dev && left.st_ino == right.st_ino;
}

static bool is_driver(const tms_state_t *state, const tms_caller_object_t *object) {
    if (object->end == 0) return false;
    return strncmp(base_of(object->path), driver_prefix, strlen(driver_prefix)) == 0 ||
           is_same_file(object->path, state->config.driver_path);
}

static bool has(const tms_caller_object_t *object, const void *address) {
    return (uintptr_t)address >= object->begin && (uintptr_t)address < object->end;
}

bool tms_counted_for(tms_state_t *state, const void *caller) {
    static const char anchor = 0;
    tms_caller_object_t object;
    if (!state || !state->config.ledger) return false;
    tms_caller_find((uintptr_t)caller, &object);
    return !has(&object, &anchor) && !is_driver(state, &object);
}

void *tms_counted_replace(tms_state_t *state, tms_hook_t hook, void *found) {
    tms_caller_object_t object;
    tms_caller_find((uintptr_t)found, &object);
    if (!is_driver(state, &object)) return found;
    return has(&object, tms_hook_keep(state, hook, found)) ? interposers[(int)hook - FIRST].function : found;
}

/* ---- cuGetProcAddress: both of its versions call the driver's first, and change a function that was found only ---- */

/* The arguments of one look-up. */
typedef struct request {
    tms_state_t *state;
    const void *caller;
    const char *name;
    int version;
    cuuint64_t flags;
} request_t;

/* Asks the driver, through the version of cuGetProcAddress that the program has called. */
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

/* Whether a function has the parameters of KNOWN_CUDA. A newer CUDA may use its name for a function with other parameters,
 * which is not counted. */
static bool has_known_parameters(const request_t *request, ask_t ask, const void *found) {
    void *known = NULL;
    if (request->version <= KNOWN_CUDA) return true;
    return ask(request, request->name, KNOWN_CUDA, &known) == CUDA_SUCCESS && known == found;
}

static void replace(const request_t *request, ask_t ask, void **function) {
    const int version = request->version < KNOWN_CUDA ? request->version : KNOWN_CUDA;
    const bool per_thread = (request->flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    void *query = NULL;
    int hook = find_procedure(request->name, version, per_thread);
    if (hook == TMS_NOT_COUNTED || !tms_counted_for(request->state, request->caller)) return;
    if (!has_known_parameters(request, ask, *function)) return;
    void *result = tms_counted_replace(request->state, (tms_hook_t)hook, *function);
    if (result == *function) return;
    *function = result;
    if (ask(request, "cuCtxGetDevice", KNOWN_CUDA, &query) == CUDA_SUCCESS && query)
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
