#include "resolve.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

/* Names of the runtime's library: libcudart.so.13, and libcudart-<hash>.so.11.0 in some Python packages. */
static const char *const runtime_prefixes[] = {"libcudart.so", "libcudart-"};

const char *tms_hook_name(tms_hook_t hook) {
    static const char *const names[] = {
#define HOOK_NAME(name, parameters) #name,
        TMS_HOOKS(HOOK_NAME)
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

/* The n-th loaded object that looks like a runtime. */
typedef struct runtime_search {
    size_t remaining;
    char path[PATH_MAX];
} runtime_search_t;

static bool is_runtime(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *base = slash ? slash + 1 : path;
    for (size_t i = 0; i < sizeof(runtime_prefixes) / sizeof(*runtime_prefixes); i++) {
        if (strncmp(base, runtime_prefixes[i], strlen(runtime_prefixes[i])) == 0) return true;
    }
    return false;
}

/* Called under the loader's lock, so it only copies the path. Libraries are opened after the walk. */
static int visit(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    runtime_search_t *search = data;
    if (!info->dlpi_name || !is_runtime(info->dlpi_name)) return 0;
    if (search->remaining-- > 0) return 0;
    int length = snprintf(search->path, sizeof(search->path), "%s", info->dlpi_name);
    if (length < 0 || (size_t)length >= sizeof(search->path)) search->path[0] = '\0';
    return 1;
}

/* A runtime opened with RTLD_LOCAL is not in the search order of this library. */
static void *find_in_loaded_runtime(const char *name) {
    for (size_t n = 0;; n++) {
        runtime_search_t search = {.remaining = n};
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

tms_hook_function_t tms_hook_real(tms_state_t *state, tms_hook_t hook) {
    void *address = state ? atomic_load_explicit(&state->real[hook], memory_order_acquire) : NULL;
    if (!address) {
        const char *name = tms_hook_name(hook);
        address = find_in(RTLD_NEXT, name);
        if (!address) address = find_in_loaded_runtime(name);
        if (address && state) atomic_store_explicit(&state->real[hook], address, memory_order_release);
    }
    /* POSIX gives the address of a function as an object pointer; copying its bytes is the conversion that C allows. */
    tms_hook_function_t function = NULL;
    _Static_assert(sizeof(function) == sizeof(address), "function and object pointers differ in size");
    memcpy(&function, &address, sizeof(function));
    return function;
}
