/* Scenarios of test_ledger.py: memory that is not managed, counted by the library that allocated it. FIRST and SECOND name
 * two libraries made of ledger_library.c. */

#include <cuda.h>
#include <pthread.h>

#include "support.h"

enum { MAX_ROWS = 16, DEVICES = 2, THREADS = 4, ROUNDS = 200, LOADS = 20, UNKNOWN_ERROR = 999 };

int cudaDeviceReset(void);

typedef int (*allocate_t)(void **address, size_t bytes);
typedef int (*free_t)(void *address);

/* Bytes and allocations of the rows whose file's name contains a text, on a device or all (-1). */
static tms_library_info_t counted(const char *name, int device) {
    tms_library_info_t rows[MAX_ROWS], sum = {.path = NULL};
    size_t count = API()->libraries(rows, MAX_ROWS);
    CHECK(count <= MAX_ROWS);
    for (size_t i = 0; i < count; i++) {
        const char *slash = strrchr(rows[i].path, '/');
        if (!strstr(slash ? slash : rows[i].path, name) || (device >= 0 && rows[i].device != device)) continue;
        sum.bytes += rows[i].bytes;
        sum.allocations += rows[i].allocations;
    }
    return sum;
}

#define COUNTED(name, size, number)                                                                                         \
    do {                                                                                                                    \
        EQUAL(counted(name, -1).bytes, size);                                                                               \
        EQUAL(counted(name, -1).allocations, number);                                                                       \
    } while (0)

static void *open_library(const char *variable) {
    void *library = dlopen(getenv(variable), RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "%s\n", dlerror());
    CHECK(library != NULL);
    return library;
}

static void *allocate_in(void *library, size_t bytes) {
    void *address = NULL;
    EQUAL(((allocate_t)dlsym(library, "library_allocate"))(&address, bytes), SUCCESS);
    return address;
}

static void free_in(void *library, void *address) { EQUAL(((free_t)dlsym(library, "library_free"))(address), SUCCESS); }

static void by_library(void) {
    void *first = open_library("FIRST"), *second = open_library("SECOND");
    void *of_first = allocate_in(first, MIB), *of_second = allocate_in(second, 2 * MIB), *own = allocate(4 * MIB);
    COUNTED("libfirst.so", MIB, 1);
    COUNTED("libsecond.so", 2 * MIB, 1);
    COUNTED("/ledger", 4 * MIB, 1);
    free_in(second, of_first);
    COUNTED("libfirst.so", 0, 0);
    COUNTED("libsecond.so", 2 * MIB, 1);
    free_in(second, own);
    EQUAL(cudaFree(of_second), SUCCESS);
    COUNTED("", 0, 0);
    EQUAL(cudaFree(NULL), SUCCESS);
}

static void by_device(void) {
    void *first = open_library("FIRST");
    void *here = allocate_in(first, MIB);
    EQUAL(cudaSetDevice(1), SUCCESS);
    void *there = allocate_in(first, 2 * MIB);
    EQUAL(counted("libfirst.so", 0).bytes, MIB);
    EQUAL(counted("libfirst.so", 1).bytes, 2 * MIB);
    free_in(first, here);
    EQUAL(counted("libfirst.so", 0).allocations, 0);
    free_in(first, there);
    COUNTED("", 0, 0);
}

static void after_dlclose(void) {
    void *held[LOADS];
    for (int round = 0; round < LOADS; round++) {
        /* The second may get the place of the first. */
        void *library = open_library(round % 2 ? "SECOND" : "FIRST");
        held[round] = allocate_in(library, round % 2 ? 2 : 1);
        EQUAL(dlclose(library), 0);
    }
    COUNTED("libfirst.so", LOADS / 2, LOADS / 2);
    COUNTED("libsecond.so", LOADS, LOADS / 2);
    for (int round = 0; round < LOADS; round++) EQUAL(cudaFree(held[round]), SUCCESS);
    COUNTED("", 0, 0);
}

static void what_fails_is_as_before(void) {
    void *address = NULL;
    EQUAL(cudaMalloc(&address, (size_t)1 << 40), MEMORY_ALLOCATION);
    COUNTED("", 0, 0);
    EQUAL(cudaMalloc(&address, 0), SUCCESS);
    EQUAL(cudaMalloc(NULL, MIB), INVALID_VALUE);
    COUNTED("", 0, 0);
    address = allocate(MIB);
    EQUAL(tms_sim_fail_after("cudaFree", 0, 1, UNKNOWN_ERROR), 0);
    EQUAL(cudaFree(address), UNKNOWN_ERROR);
    COUNTED("", MIB, 1);
    EQUAL(cudaFree(address), SUCCESS);
    COUNTED("", 0, 0);
}

static void managed_memory_is_not_counted(void) {
    TMS(tms_set_interesting_region)(true);
    void *managed = allocate(2 * MIB);
    CHECK(is_managed(managed));
    COUNTED("", 0, 0);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    COUNTED("", 0, 0);
    TMS(tms_set_interesting_region)(false);
    void *ordinary = allocate(MIB);
    COUNTED("", MIB, 1);
    EQUAL(cudaFree(managed), SUCCESS);
    COUNTED("", MIB, 1);
    EQUAL(cudaFree(ordinary), SUCCESS);
    COUNTED("", 0, 0);
}

static void a_reset_device(void) {
    (void)allocate(MIB);
    EQUAL(cudaSetDevice(1), SUCCESS);
    void *there = allocate(2 * MIB);
    EQUAL(cudaSetDevice(0), SUCCESS);
    EQUAL(cudaDeviceReset(), SUCCESS);
    COUNTED("", 2 * MIB, 1);
    EQUAL(cudaFree(there), SUCCESS);
    COUNTED("", 0, 0);
}

/* ---- the driver's functions ---- */

static void the_drivers_memory(void) {
    CUdeviceptr address = 0;
    EQUAL(cudaFree(NULL), SUCCESS); /* a context */
    EQUAL(cuMemAlloc_v2(&address, MIB), SUCCESS);
    COUNTED("/ledger", MIB, 1);
    EQUAL(counted("/ledger", 0).allocations, 1);
    EQUAL(cuMemFree_v2(address), SUCCESS);
    COUNTED("", 0, 0);
}

static const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                               .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                               .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1}};

static void physical_memory(void) {
    CUmemGenericAllocationHandle handle = 0, again = 0;
    CUdeviceptr address = 0;
    EQUAL(cudaFree(NULL), SUCCESS);
    EQUAL(cuMemAddressReserve(&address, 4 * MIB, 0, 0, 0), SUCCESS);
    for (int unmapped_first = 0; unmapped_first < 2; unmapped_first++) {
        EQUAL(cuMemCreate(&handle, 2 * MIB, &properties, 0), SUCCESS);
        EQUAL(counted("/ledger", 1).bytes, 2 * MIB);
        EQUAL(cuMemMap(address, 2 * MIB, 0, handle, 0), SUCCESS);
        EQUAL(unmapped_first ? cuMemUnmap(address, 2 * MIB) : cuMemRelease(handle), SUCCESS);
        COUNTED("/ledger", 2 * MIB, 1);
        EQUAL(unmapped_first ? cuMemRelease(handle) : cuMemUnmap(address, 2 * MIB), SUCCESS);
        COUNTED("/ledger", 0, 0);
    }
    EQUAL(cuMemCreate(&handle, 2 * MIB, &properties, 0), SUCCESS);
    EQUAL(cuMemMap(address, 2 * MIB, 0, handle, 0), SUCCESS);
    EQUAL(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)address), SUCCESS);
    EQUAL(cuMemUnmap(address, 2 * MIB), SUCCESS);
    EQUAL(cuMemRelease(handle), SUCCESS);
    COUNTED("/ledger", 2 * MIB, 1);
    EQUAL(cuMemRelease(again), SUCCESS);
    COUNTED("", 0, 0);
    EQUAL(cuMemAddressFree(address, 4 * MIB), SUCCESS);
}

static void imported_memory_is_another_processes(void) {
    CUmemGenericAllocationHandle handle = 0, imported = 0;
    CUdeviceptr address = 0;
    intptr_t descriptor = -1;
    EQUAL(cudaFree(NULL), SUCCESS);
    EQUAL(cuMemAddressReserve(&address, 2 * MIB, 0, 0, 0), SUCCESS);
    EQUAL(cuMemCreate(&handle, 2 * MIB, &properties, 0), SUCCESS);
    EQUAL(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), SUCCESS);
    EQUAL(cuMemImportFromShareableHandle(&imported, (void *)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), SUCCESS);
    EQUAL(cuMemMap(address, 2 * MIB, 0, imported, 0), SUCCESS);
    COUNTED("/ledger", 2 * MIB, 1);
    EQUAL(cuMemRelease(handle), SUCCESS);
    COUNTED("", 0, 0);
    EQUAL(cuMemUnmap(address, 2 * MIB), SUCCESS);
    EQUAL(cuMemRelease(imported), SUCCESS);
    COUNTED("", 0, 0);
}

/* ---- threads and the loader ---- */

static void a_thread_that_a_constructor_waits_for(void) {
    EQUAL(cudaFree(NULL), SUCCESS); /* finds the real functions, which needs the lock of the loader */
    void *address = allocate(MIB);
    EQUAL(setenv("ALLOCATE_IN_CONSTRUCTOR", "1", 1), 0);
    (void)open_library("FIRST");
    EQUAL(cudaFree(address), SUCCESS);
    COUNTED("", 0, 0);
}

static _Atomic bool stops;

static void *load_and_unload(void *unused) {
    (void)unused;
    while (!stops) EQUAL(dlclose(open_library("SECOND")), 0);
    return NULL;
}

static void *allocate_and_free(void *first) {
    for (int round = 0; round < ROUNDS; round++) {
        void *address = allocate_in(first, MIB);
        void *own = allocate(1);
        CHECK(counted("libfirst.so", -1).bytes >= MIB);
        EQUAL(cudaFree(address), SUCCESS);
        free_in(first, own);
    }
    return NULL;
}

static void many_threads(void) {
    pthread_t threads[THREADS], loader;
    void *first = open_library("FIRST");
    EQUAL(pthread_create(&loader, NULL, load_and_unload, NULL), 0);
    for (int i = 0; i < THREADS; i++) EQUAL(pthread_create(&threads[i], NULL, allocate_and_free, first), 0);
    for (int i = 0; i < THREADS; i++) EQUAL(pthread_join(threads[i], NULL), 0);
    stops = true;
    EQUAL(pthread_join(loader, NULL), 0);
    COUNTED("", 0, 0);
    EQUAL(counters().uncounted_allocations_total, 0);
}

MAIN(SCENARIO(by_library), SCENARIO(by_device), SCENARIO(after_dlclose), SCENARIO(what_fails_is_as_before),
     SCENARIO(managed_memory_is_not_counted), SCENARIO(a_reset_device), SCENARIO(the_drivers_memory),
     SCENARIO(physical_memory), SCENARIO(imported_memory_is_another_processes),
     SCENARIO(a_thread_that_a_constructor_waits_for), SCENARIO(many_threads))
