/* Another preloaded library that interposes cudaMalloc, cudaFree and malloc. It counts the calls; each of its allocations
 * has a guard allocation of its own, made with the cudaMalloc that programs call. */

#include <dlfcn.h>
#include <stddef.h>

static _Thread_local int inside;
static int cuda_mallocs, cuda_frees, mallocs;

__attribute__((visibility("default"))) int neighbour_cuda_mallocs(void) { return cuda_mallocs; }
__attribute__((visibility("default"))) int neighbour_cuda_frees(void) { return cuda_frees; }
__attribute__((visibility("default"))) int neighbour_mallocs(void) { return mallocs; }

extern void *__libc_malloc(size_t bytes);

__attribute__((visibility("default"))) void *malloc(size_t bytes) {
    __atomic_fetch_add(&mallocs, 1, __ATOMIC_RELAXED);
    return __libc_malloc(bytes);
}

__attribute__((visibility("default"))) int cudaFree(void *address) {
    int (*next)(void *) = NULL;
    *(void **)&next = dlsym(RTLD_NEXT, "cudaFree");
    __atomic_fetch_add(&cuda_frees, 1, __ATOMIC_RELAXED);
    return next(address);
}

__attribute__((visibility("default"))) int cudaMalloc(void **address, size_t bytes) {
    int (*next)(void **, size_t) = NULL;
    *(void **)&next = dlsym(RTLD_NEXT, "cudaMalloc");
    __atomic_fetch_add(&cuda_mallocs, 1, __ATOMIC_RELAXED);
    if (!inside) {
        int (*as_programs_do)(void **, size_t) = NULL;
        void *guard = NULL;
        *(void **)&as_programs_do = dlsym(RTLD_DEFAULT, "cudaMalloc");
        inside = 1;
        int result = as_programs_do(&guard, 512);
        if (result == 0) result = cudaFree(guard);
        inside = 0;
        if (result != 0) return result;
    }
    return next(address, bytes);
}
