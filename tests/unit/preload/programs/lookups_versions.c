/* Scenarios of test_lookups.py over lookups_driver.c: which version of a function is asked for. */
#include "support.h"

typedef int (*first_t)(const char *symbol, void **function, int version, unsigned long flags);
typedef int (*second_t)(const char *symbol, void **function, int version, unsigned long flags, int *status);
typedef int (*allocate_t)(size_t *address, size_t bytes);
typedef int (*allocate_in_order_t)(size_t *address, size_t bytes, void *stream);
typedef int (*allocate_newer_t)(size_t *address, void *stream, size_t bytes);
typedef int (*free_t)(size_t address);

enum {
    CUDA_3 = 3000,
    CUDA_11_3 = 11030,
    CUDA_12 = 12000,
    CUDA_13_9 = 13090,
    CUDA_14 = 14000,
    PER_THREAD = 2,
    NOT_FOUND = 500,
    DEVICE = 4
};

static void *driver;
static second_t second;

static void expect(size_t bytes, size_t allocations) {
    tms_library_info_t rows[2];
    EQUAL(API()->libraries(rows, 2), allocations ? 1 : 0);
    if (allocations == 0) return;
    CHECK(strstr(rows[0].path, "/lookups_versions") != NULL);
    EQUAL(rows[0].device, DEVICE);
    EQUAL(rows[0].bytes, bytes);
    EQUAL(rows[0].allocations, allocations);
}

static void start(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(driver != NULL);
    second = (second_t)dlsym(driver, "cuGetProcAddress_v2");
    CHECK(second != NULL);
}

static void *find(const char *name, int version, unsigned long flags) {
    void *function = NULL;
    int status = -1;
    EQUAL(second(name, &function, version, flags, &status), SUCCESS);
    EQUAL(status, 0);
    return function;
}

static const void *last_stream(void) { return ((const void *(*)(void))dlsym(driver, "driver_last_stream"))(); }

static void every_version_that_is_known(void) {
    size_t address = 0;
    start();
    EQUAL(((allocate_t)find("cuMemAlloc", CUDA_12, 0))(&address, 100), SUCCESS);
    expect(100, 1);
    EQUAL(((free_t)find("cuMemFree", CUDA_13_9, 0))(address), SUCCESS);
    expect(0, 0);
    /* The newer version of CUDA has the same function. */
    EQUAL(((allocate_t)find("cuMemAlloc", CUDA_14, 0))(&address, 100), SUCCESS);
    expect(100, 1);
    /* And functions with other parameters. */
    unsigned int number = 0;
    EQUAL(((int (*)(unsigned int *, unsigned int))find("cuMemAlloc", CUDA_3, 0))(&number, 7), SUCCESS);
    EQUAL(number, 7);
    EQUAL(((allocate_newer_t)find("cuMemAllocAsync", CUDA_14, 0))(&address, NULL, 50), SUCCESS);
    expect(100, 1);
    void *function = &function;
    EQUAL(second("cuNothing", &function, CUDA_12, 0, NULL), NOT_FOUND);
    CHECK(function == NULL);
}

static void per_thread_streams(void) {
    size_t address = 0;
    char stream;
    start();
    EQUAL(((allocate_in_order_t)find("cuMemAllocAsync", CUDA_12, 0))(&address, 10, NULL), SUCCESS);
    CHECK(last_stream() == NULL);
    EQUAL(((allocate_in_order_t)find("cuMemAllocAsync", CUDA_12, PER_THREAD))(&address, 10, NULL), SUCCESS);
    CHECK(strcmp(last_stream(), "per thread") == 0);
    EQUAL(((allocate_in_order_t)find("cuMemAllocAsync", CUDA_12, PER_THREAD))(&address, 10, &stream), SUCCESS);
    CHECK(last_stream() == &stream);
    expect(30, 3);
}

static void both_functions_that_look_up(void) {
    size_t address = 0;
    void *function = NULL;
    start();
    CHECK(find("cuGetProcAddress", CUDA_12, 0) == (void *)second);
    first_t first = (first_t)find("cuGetProcAddress", CUDA_11_3, 0);
    CHECK((void *)first != (void *)second && (void *)first == dlsym(driver, "cuGetProcAddress"));
    EQUAL(first("cuMemAlloc", &function, CUDA_11_3, 0), SUCCESS);
    EQUAL(((allocate_t)function)(&address, 100), SUCCESS);
    expect(100, 1);
}

MAIN(SCENARIO(every_version_that_is_known), SCENARIO(per_thread_streams), SCENARIO(both_functions_that_look_up))
