/* Scenarios of test_lookups.py: libraries that find the driver themselves. FIRST and SECOND name two libraries made of
 * lookups_library.c, and STUB a library that has a driver's function and is none. */
#include <cuda.h>
#undef cuGetProcAddress

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

enum { MOST_ROWS = 16, THREADS = 4, ROUNDS = 100, ADDRESS_TEXT = 32 };

/* Bytes and allocations of the rows whose file's name contains a text. */
static tms_library_info_t counted(const char *name) {
    tms_library_info_t rows[MOST_ROWS], sum = {.path = NULL};
    size_t count = API()->libraries(rows, MOST_ROWS);
    CHECK(count <= MOST_ROWS);
    for (size_t i = 0; i < count; i++) {
        const char *slash = strrchr(rows[i].path, '/');
        if (!strstr(slash ? slash : rows[i].path, name)) continue;
        EQUAL(rows[i].device, 0);
        sum.bytes += rows[i].bytes;
        sum.allocations += rows[i].allocations;
    }
    return sum;
}

#define COUNTED(name, size, number)                                                                                         \
    do {                                                                                                                    \
        EQUAL(counted(name).bytes, size);                                                                                   \
        EQUAL(counted(name).allocations, number);                                                                           \
    } while (0)

typedef struct library {
    void *handle;
    void (*start)(void);
    CUdeviceptr (*allocate)(size_t bytes);
    void (*free)(CUdeviceptr address);
    CUmemGenericAllocationHandle (*create)(size_t bytes);
    CUdeviceptr (*map)(CUmemGenericAllocationHandle handle, size_t bytes);
    void (*release)(CUmemGenericAllocationHandle handle);
    void (*unmap)(CUdeviceptr address, size_t bytes);
} library_t;

#define FIND(library, field) ((library).field = (__typeof__((library).field))dlsym((library).handle, "library_" #field))

static library_t open_library(const char *variable, int mode) {
    library_t library = {.handle = dlopen(getenv(variable), RTLD_NOW | mode)};
    if (!library.handle) fprintf(stderr, "%s\n", dlerror());
    CHECK(library.handle != NULL);
    CHECK(FIND(library, start) && FIND(library, allocate) && FIND(library, free) && FIND(library, create));
    CHECK(FIND(library, map) && FIND(library, release) && FIND(library, unmap));
    library.start();
    return library;
}

static void two_libraries(int mode) {
    library_t first = open_library("FIRST", mode), second = open_library("SECOND", mode);
    CUdeviceptr of_first = first.allocate(MIB), of_second = second.allocate(2 * MIB);
    COUNTED("libfirst_lookups.so", MIB, 1);
    COUNTED("libsecond_lookups.so", 2 * MIB, 1);
    second.free(of_first);
    COUNTED("libfirst_lookups.so", 0, 0);
    first.free(of_second);
    COUNTED("", 0, 0);
}

static void local_libraries(void) { two_libraries(RTLD_LOCAL); }
static void global_libraries(void) { two_libraries(RTLD_GLOBAL); }

static void physical_memory(void) {
    library_t first = open_library("FIRST", RTLD_LOCAL);
    CUmemGenericAllocationHandle handle = first.create(2 * MIB);
    COUNTED("libfirst_lookups.so", 2 * MIB, 1);
    CUdeviceptr address = first.map(handle, 2 * MIB);
    first.release(handle);
    COUNTED("libfirst_lookups.so", 2 * MIB, 1);
    first.unmap(address, 2 * MIB);
    COUNTED("", 0, 0);
}

static void by_symbol(void) {
    library_t first = open_library("FIRST", RTLD_LOCAL);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CUdeviceptr address = 0;
    CHECK(driver != NULL);
    EQUAL(((CUresult (*)(CUdeviceptr *, size_t))dlsym(driver, "cuMemAlloc_v2"))(&address, MIB), CUDA_SUCCESS);
    COUNTED("/lookups", MIB, 1);
    first.free(address);
    COUNTED("", 0, 0);
    dlerror();
    CHECK(dlsym(driver, "cuMemAllocFromPoolAsync_ptsz") == NULL); /* not of the simulated GPU */
    const char *message = dlerror();
    CHECK(message && strstr(message, "cuMemAllocFromPoolAsync_ptsz"));
}

static void after_dlclose(void) {
    library_t first = open_library("FIRST", RTLD_LOCAL), second = open_library("SECOND", RTLD_LOCAL);
    CUdeviceptr address = first.allocate(MIB);
    EQUAL(dlclose(first.handle), 0);
    COUNTED("libfirst_lookups.so", MIB, 1);
    second.free(address);
    COUNTED("", 0, 0);
}

static void managed_memory_is_not_counted(void) {
    tms_error_t error;
    uint64_t managed = 0;
    library_t first = open_library("FIRST", RTLD_LOCAL);
    EQUAL(API()->allocate(4 * MIB, 0, &managed, &error), TMS_OK);
    COUNTED("", 0, 0);
    CUdeviceptr address = first.allocate(MIB);
    COUNTED("", MIB, 1);
    EQUAL(API()->free(managed, &error), TMS_OK);
    first.free(address);
    COUNTED("", 0, 0);
}

/* What a library finds is the driver's own function. */
static void switched_off(void) {
    library_t first = open_library("FIRST", RTLD_LOCAL);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *found = dlsym(driver, "cuMemAlloc_v2");
    Dl_info library;
    CHECK(dladdr(found, &library) && strstr(library.dli_fname, "libcuda.so.1"));
    CUdeviceptr address = first.allocate(MIB);
    COUNTED("", 0, 0);
    first.free(address);
}

static void a_function_of_another_library(void) {
    void *stub = dlopen(getenv("STUB"), RTLD_NOW | RTLD_LOCAL), *found = dlsym(stub, "cuMemAlloc_v2");
    Dl_info library;
    CHECK(found && dladdr(found, &library) && strstr(library.dli_fname, "libstub.so"));
}

static library_t used;

static void round_of_used(void) {
    for (int i = 0; i < ROUNDS; i++) used.free(used.allocate(MIB));
}

static void *rounds(void *unused) {
    (void)unused;
    used.start();
    round_of_used();
    return NULL;
}

static void many_threads(void) {
    pthread_t threads[THREADS];
    used = open_library("FIRST", RTLD_LOCAL);
    CUdeviceptr kept = used.allocate(MIB);
    for (int i = 0; i < THREADS; i++) EQUAL(pthread_create(&threads[i], NULL, rounds, NULL), 0);
    for (int i = 0; i < THREADS; i++) EQUAL(pthread_join(threads[i], NULL), 0);
    COUNTED("libfirst_lookups.so", MIB, 1);
    used.free(kept);
    COUNTED("", 0, 0);
}

static CUcontext used_context;
static CUresult (*set_current)(CUcontext);

static void round_in_thread(void) {
    EQUAL(set_current(used_context), CUDA_SUCCESS);
    round_of_used();
}

static void a_thread_that_a_constructor_waits_for(void) {
    char address[ADDRESS_TEXT];
    used = open_library("FIRST", RTLD_LOCAL);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    EQUAL(((CUresult (*)(CUcontext *))dlsym(driver, "cuCtxGetCurrent"))(&used_context), CUDA_SUCCESS);
    set_current = (CUresult (*)(CUcontext))dlsym(driver, "cuCtxSetCurrent");
    snprintf(address, sizeof(address), "%p", (void *)round_in_thread);
    setenv("ROUND", address, 1);
    CHECK(dlopen(getenv("SECOND"), RTLD_NOW | RTLD_LOCAL) != NULL);
    COUNTED("", 0, 0);
}

static void a_forked_child(void) {
    int status = 0;
    library_t first = open_library("FIRST", RTLD_LOCAL);
    CUdeviceptr address = first.allocate(MIB);
    pid_t child = fork();
    if (child == 0) {
        bool empty = counted("").allocations == 0;
        _exit(empty && dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAlloc_v2") ? 0 : 1);
    }
    EQUAL(waitpid(child, &status, 0), child);
    EQUAL(status, 0);
    COUNTED("libfirst_lookups.so", MIB, 1);
    first.free(address);
    COUNTED("", 0, 0);
}

MAIN(SCENARIO(local_libraries), SCENARIO(global_libraries), SCENARIO(physical_memory), SCENARIO(by_symbol),
     SCENARIO(after_dlclose), SCENARIO(managed_memory_is_not_counted), SCENARIO(switched_off),
     SCENARIO(a_function_of_another_library), SCENARIO(many_threads), SCENARIO(a_thread_that_a_constructor_waits_for),
     SCENARIO(a_forked_child))
