/* Opens a library that uses CUDA with RTLD_LOCAL, as Python opens torch: the global scope has the interposers' names, but
 * not the runtime. The arguments are the library and the scenario. */

#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    if (dlsym(RTLD_DEFAULT, "cudaGetDevice")) {
        fprintf(stderr, "the runtime is in the global scope already\n");
        return 2;
    }
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    int (*run)(int, char **) = NULL;
    *(void **)&run = dlsym(library, "run");
    char *arguments[] = {argv[0], argv[2], NULL};
    return run ? run(2, arguments) : 2;
}
