/* Calls the interposers in a process without any CUDA runtime: a clear error, and the process continues. */

#include <dlfcn.h>
#include <stdio.h>

enum { SYMBOL_NOT_FOUND = 302 };

int main(void) {
    int (*allocate)(void **, unsigned long) = NULL;
    int (*release)(void *) = NULL;
    void *address = NULL;
    *(void **)&allocate = dlsym(RTLD_DEFAULT, "cudaMalloc");
    *(void **)&release = dlsym(RTLD_DEFAULT, "cudaFree");
    if (!allocate || !release) return 2;
    for (int i = 0; i < 3; i++) {
        if (allocate(&address, 1 << 20) != SYMBOL_NOT_FOUND || address) return 1;
        if (release((void *)0x1000) != SYMBOL_NOT_FOUND) return 1;
        if (release(NULL) != SYMBOL_NOT_FOUND) return 1;
    }
    printf("done\n");
    return 0;
}
