#include "real_dlsym.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "counted.h"

/* The version that dlsym has in each glibc for the processor. A search for one that a glibc lacks would allocate memory for
 * a message. */
#if defined(__x86_64__)
static const char dlsym_version[] = "GLIBC_2.2.5";
#else
static const char dlsym_version[] = "GLIBC_2.17";
#endif

static void *find_nothing(void *handle, const char *symbol) {
    (void)handle;
    (void)symbol;
    return NULL;
}

TMS_LOOKUPS_EARLY tms_dlsym_t tms_real_dlsym(void) {
    static _Atomic(void *) kept;
    void *found = atomic_load_explicit(&kept, memory_order_acquire);
    if (!found) {
        found = dlvsym(RTLD_NEXT, "dlsym", dlsym_version);
        if (!found) return find_nothing;
        atomic_store_explicit(&kept, found, memory_order_release);
    }
    return (tms_dlsym_t)found;
}
