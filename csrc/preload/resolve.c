#include "resolve.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

#include "abi/start.h"

/* Names of the runtime's library: libcudart.so.13, and libcudart-<hash>.so.11.0 in some Python packages. */
static const char *const runtime_prefixes[] = {"libcudart.so", "libcudart-", NULL};
static const char *const driver_prefixes[] = {"libcuda.so", NULL};

const char *tms_hook_name(tms_hook_t hook) {
    static const char *const names[] = {
#define HOOK_NAME(name, parameters) #name,
        TMS_REAL_FUNCTIONS(HOOK_NAME)
#undef HOOK_NAME
    };
    return names[hook];
}

/* Whether an address belongs to this library. An interposer that found itself would recurse endlessly. */
static bool is_ours(const void *address) {
    static const char anchor = 0;
    Dl_info here, there;
    return dladdr(&anchor, &here) && dladdr(address, &there) && here.dli_fbase == there.dli_fbase;
}

static void *find_in(void *library, const char *name) {
    void *address = dlsym(library, name);
    if (!address) (void)dlerror(); /* clears the error, so that the program's next dlerror does not return it */
    return address && !is_ours(address) ? address : NULL;
}

/* The n-th loaded object whose name begins with one of the prefixes. */
typedef struct library_search {
    const char *const *prefixes;
    size_t remaining;
    char path[PATH_MAX];
} library_search_t;

bool tms_hook_is_named(const char *path, const char *const *prefixes) {
    const char *slash = strrchr(path, '/');
    const char *base = slash ? slash + 1 : path;
    for (; *prefixes; prefixes++) {
        if (strncmp(base, *prefixes, strlen(*prefixes)) == 0) return true;
    }
    return false;
}

/* Called under the loader's lock, so it only copies the path. Libraries are opened after the walk. */
static int visit(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    library_search_t *search = data;
    if (!info->dlpi_name || !tms_hook_is_named(info->dlpi_name, search->prefixes)) return 0;
    if (search->remaining-- > 0) return 0;
    int length = snprintf(search->path, sizeof(search->path), "%s", info->dlpi_name);
    if (length < 0 || (size_t)length >= sizeof(search->path)) search->path[0] = '\0';
    return 1;
}

/* A library opened with RTLD_LOCAL is not in the search order of this one. */
static void *find_in_loaded(const char *const *prefixes, const char *name) {
    for (size_t n = 0;; n++) {
        library_search_t search = {.prefixes = prefixes, .remaining = n};
        if (dl_iterate_phdr(visit, &search) == 0) return NULL;
        void *library = dlopen(search.path, RTLD_NOLOAD | RTLD_LAZY);
        if (!library) {
            (void)dlerror();
            continue;
        }
        void *address = find_in(library, name);
        /* The reference is kept, so that the library of the remembered address is not unloaded. */
        if (address) return address;
        dlclose(library);
    }
}

tms_state_t *tms_hook_state(void) {
    tms_state_t *state = tms_state(NULL);
    return state && !state->config.disable ? state : NULL;
}

tms_hook_function_t tms_hook_real(tms_state_t *state, tms_hook_t hook) {
    if (!state) state = tms_state_if_made();
    void *address = state ? atomic_load_explicit(&state->real[hook], memory_order_acquire) : NULL;
    if (!address) {
        const char *name = tms_hook_name(hook);
        address = find_in(RTLD_NEXT, name);
        if (!address) address = find_in_loaded(tms_hook_is_of_driver(hook) ? driver_prefixes : runtime_prefixes, name);
        if (address && state) atomic_store_explicit(&state->real[hook], address, memory_order_release);
    }
    /* POSIX gives the address of a function as an object pointer; copying its bytes is the conversion that C allows. */
    tms_hook_function_t function = NULL;
    _Static_assert(sizeof(function) == sizeof(address), "function and object pointers differ in size");
    memcpy(&function, &address, sizeof(function));
    return function;
}

int tms_hook_missing(tms_state_t *state, tms_hook_t hook) {
    const char *library = tms_hook_is_of_driver(hook) ? "driver (libcuda)" : "runtime (libcudart)";
    if (state)
        tms_log_once(&state->log, &state->warned_no_runtime, TMS_LOG_ERROR,
                     "%s failed: no loaded CUDA %s provides it; load that library before the call", tms_hook_name(hook),
                     library);
    return TMS_CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
}
