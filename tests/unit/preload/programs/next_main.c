/* The scenarios of test_lookups.py that do not use CUDA: RTLD_NEXT and RTLD_DEFAULT mean what they mean without us. LOCAL
 * names the library made of next_library.c, which is opened, and the program is linked with another copy of it. */
#include "support.h"

int library_next(void);
int library_default(void);

static void *find_in(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static bool lies_in(const void *address, const char *name) {
    Dl_info library;
    return dladdr(address, &library) && strstr(library.dli_fname, name) != NULL;
}

/* Of the C library, or of a sanitizer, whose own stands before that. */
static bool is_the_last(const void *function) { return lies_in(function, "libc.so") || lies_in(function, "libasan"); }

static void scopes(void) {
    void *local = dlopen(getenv("LOCAL"), RTLD_NOW | RTLD_LOCAL);
    CHECK(local != NULL);
    EQUAL(library_default(), 1);
    EQUAL(library_next(), 0); /* no library after it has one */
    EQUAL(((int (*)(void))find_in(local, "library_finds_itself"))(), 1);
    CHECK(dlsym(RTLD_DEFAULT, "only_in_local") == NULL);
    CHECK(dlerror() != NULL);
    CHECK(is_the_last(dlsym(RTLD_NEXT, "malloc")));
    EQUAL(((int (*)(void))find_in(local, "library_only_here"))(), 5);
}

static void next_malloc(void) {
    unsigned long (*calls)(void) = (unsigned long (*)(void))find_in(RTLD_DEFAULT, "next_malloc_calls");
    void *(*address)(void) = (void *(*)(void))find_in(RTLD_DEFAULT, "next_malloc_address");
    unsigned long before = calls();
    void *volatile memory = malloc(100);
    CHECK(memory != NULL && calls() > before);
    free(memory);
    CHECK(is_the_last(address()));
}

/* A name that begins as those of the driver do is looked for as usual. */
static void names_of_the_driver_elsewhere(void) {
    CHECK(dlsym(RTLD_NEXT, "cuMemNothing") == NULL);
    const char *message = dlerror();
    CHECK(message && strstr(message, "cuMemNothing"));
    CHECK(lies_in(find_in(RTLD_DEFAULT, "cuMemAlloc_v2"), "hook_mode_preload"));
}

MAIN(SCENARIO(scopes), SCENARIO(next_malloc), SCENARIO(names_of_the_driver_elsewhere))
