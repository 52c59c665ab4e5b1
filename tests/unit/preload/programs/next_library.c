/* A library with a function that next_main.c and next_other.c have, too. What it finds depends on where it asks from. */
#include <dlfcn.h>
#include <stddef.h>

int where_defined(void) { return 1; }

typedef int (*where_t)(void);

static int call(void *handle) {
    where_t found = (where_t)dlsym(handle, "where_defined");
    return found ? found() : 0;
}

int library_next(void) { return call(RTLD_NEXT); }
int library_default(void) { return call(RTLD_DEFAULT); }
int library_only_here(void) { return 5; }
/* Found in the scope of the library itself, where it was opened with RTLD_LOCAL. */
int library_finds_itself(void) { return dlsym(RTLD_DEFAULT, "library_only_here") ? 1 : 0; }
