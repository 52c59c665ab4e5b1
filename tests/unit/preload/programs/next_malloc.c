/* A library that stands before malloc and free: it finds the next ones in its constructor, or in the first call before. */
#include <dlfcn.h>
#include <stddef.h>

static void *(*next_malloc)(size_t bytes);
static void (*next_free)(void *address);
static unsigned long calls;

__attribute__((constructor)) static void find_next(void) {
    if (!next_malloc) next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    if (!next_free) next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
}

void *malloc(size_t bytes) {
    if (!next_malloc) find_next();
    calls++;
    return next_malloc(bytes);
}

void free(void *address) {
    if (!next_free) find_next();
    next_free(address);
}

unsigned long next_malloc_calls(void) { return calls; }
void *next_malloc_address(void) { return (void *)next_malloc; }
