/* Guards driver.c: loading, failures of loading, and driver calls as error values. The drivers are small libraries compiled
 * by the test; without a compiler those tests are skipped. */
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "device/driver.h"
#include "temporary.h"

enum { PATH_BYTES = TEMPORARY_BYTES, COMMAND_BYTES = 1024, THREADS = 4 };

static char directory[PATH_BYTES];
static bool have_compiler;
static tms_log_t log_under_test;
static const tms_error_context_t context = {.operation = "allocate", .device = 1, .bytes = 4096};

/* Options omit functions or set what cuInit returns. */
static const char driver_source[] =
    "int init_calls, init_flags = -1;\n"
    "#ifndef NO_INIT\n"
    "#ifndef INIT_RESULT\n#define INIT_RESULT 0\n#endif\n"
    "int cuInit(unsigned flags) { __atomic_add_fetch(&init_calls, 1, 5); init_flags = (int)flags; return INIT_RESULT; }\n"
    "#endif\n"
    "#ifndef NO_NAMES\n"
    "int cuGetErrorName(int result, const char **name) {\n"
    "    *name = result == 100 ? \"CUDA_ERROR_NO_DEVICE\" : result == 2 ? \"CUDA_ERROR_OUT_OF_MEMORY\" : 0;\n"
    "    return *name ? 0 : 1;\n}\n"
    "#endif\n"
    "#ifndef NO_CREATE\nint cuMemCreate(void) { return 0; }\n#endif\n"
    "int cuMemAddressReserve(void) { return 0; }\nint cuMemAddressFree(void) { return 0; }\n"
    "int cuMemRelease(void) { return 0; }\nint cuMemMap(void) { return 0; }\nint cuMemUnmap(void) { return 0; }\n"
    "int cuMemSetAccess(void) { return 0; }\nint cuDevicePrimaryCtxRelease_v2(int device) { return device; }\n"
    "int cuDevicePrimaryCtxRelease(int device) { return 999; }\n";

static int make_directory(void **state) {
    (void)state;
    char path[PATH_BYTES + 16];
    tms_log_init(&log_under_test, TMS_LOG_WARNING);
    if (!make_temporary_directory(directory, "driver")) return -1;
    snprintf(path, sizeof(path), "%s/driver.c", directory);
    FILE *file = fopen(path, "w");
    if (!file || fputs(driver_source, file) < 0 || fclose(file) != 0) return -1;
    have_compiler = system("${CC:-cc} --version >/dev/null 2>&1") == 0;
    return 0;
}

static int remove_directory(void **state) {
    (void)state;
    return remove_temporary_directory(directory);
}

/* The path of a driver compiled with `options`. Each name is compiled once. */
static void compile_driver(const char *name, const char *options, char path[PATH_BYTES]) {
    char command[COMMAND_BYTES];
    if (!have_compiler) {
        print_message("skipped: there is no C compiler (CC) to make a driver with\n");
        skip();
    }
    assert_true(snprintf(path, PATH_BYTES, "%s/%s.so", directory, name) < PATH_BYTES);
    snprintf(command, sizeof(command), "${CC:-cc} -w -shared -fPIC %s -o '%s' '%s/driver.c'", options, path, directory);
    assert_int_equal(system(command), 0);
}

/* A counter of a driver that is loaded. */
static int counter(const char *path, const char *name) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(library);
    int value = *(int *)dlsym(library, name);
    dlclose(library);
    return value;
}

static bool is_loaded(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library) dlclose(library);
    return library != NULL;
}

static void assert_unavailable(const char *path, const char *part, const char *other_part) {
    tms_driver_t driver;
    tms_error_t error;
    const tms_driver_table_t *table = (const tms_driver_table_t *)&driver;
    tms_driver_init(&driver, path, &log_under_test);
    for (int time = 0; time < 2; time++) { /* a failure leaves nothing behind, and the same error is returned again */
        assert_int_equal(tms_driver_load(&driver, &table, &context, &error), TMS_DRIVER_UNAVAILABLE);
        assert_ptr_equal(table, &driver);
        assert_int_equal(error.status, TMS_DRIVER_UNAVAILABLE);
        assert_string_equal(error.operation, "allocate");
        assert_int_equal(error.device, 1);
        if (!strstr(error.message, part)) fail_msg("'%s' is not in '%s'", part, error.message);
        if (!strstr(error.message, other_part)) fail_msg("'%s' is not in '%s'", other_part, error.message);
        assert_non_null(strstr(error.message, "TMS_CUDA_DRIVER"));
        assert_int_equal(tms_driver_load(&driver, &table, &context, NULL), TMS_DRIVER_UNAVAILABLE);
    }
    tms_driver_release(&driver);
}

static void test_no_library(void **state) {
    (void)state;
    assert_unavailable("/nonexistent/libcuda.so.1", "could not be loaded", "/nonexistent/libcuda.so.1");
}

static void test_not_a_driver(void **state) {
    (void)state;
    assert_unavailable("libm.so.6", "'libm.so.6' is not a CUDA driver", "cuInit");
    char path[PATH_BYTES];
    compile_driver("no_init", "-DNO_INIT", path);
    assert_unavailable(path, path, "is not a CUDA driver");
    assert_false(is_loaded(path));
}

/* Other kinds of files in place of a driver. The call does not block on them, and a driver put there later is loaded. */
static void test_not_a_library(void **state) {
    (void)state;
    char path[PATH_BYTES], good[PATH_BYTES];
    assert_unavailable(directory, "is not a regular file", directory);
    assert_true(snprintf(path, sizeof(path), "%s/driver.c", directory) < PATH_BYTES);
    assert_unavailable(path, "could not be loaded", path);
    assert_true(snprintf(path, sizeof(path), "%.200s/fifo", directory) < PATH_BYTES);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_unavailable(path, "is not a regular file", path);
    assert_unavailable("/dev/zero", "is not a regular file", "/dev/zero");

    tms_driver_t driver;
    tms_error_t error;
    const tms_driver_table_t *table = NULL;
    compile_driver("late", "", good);
    compile_driver("short", "", path);
    assert_int_equal(truncate(path, 2000), 0); /* mapping more than that would end the process */
    assert_unavailable(path, "is truncated", path);
    assert_true(snprintf(path, sizeof(path), "%.200s/fifo", directory) < PATH_BYTES);
    tms_driver_init(&driver, path, &log_under_test);
    assert_int_equal(tms_driver_load(&driver, &table, &context, &error), TMS_DRIVER_UNAVAILABLE);
    assert_int_equal(rename(good, path), 0);
    assert_int_equal(tms_driver_load(&driver, &table, &context, &error), TMS_OK);
    assert_non_null(table);
    tms_driver_release(&driver);
}

/* The library exists, but after a change of the working directory the path could lead to another one. */
static void test_a_relative_path_is_refused(void **state) {
    (void)state;
    char path[PATH_BYTES], former[4096];
    compile_driver("relative", "", path);
    assert_non_null(getcwd(former, sizeof(former)));
    assert_int_equal(chdir(directory), 0);
    assert_unavailable("./relative.so", "TMS_CUDA_DRIVER is './relative.so'", "is not an absolute path");
    assert_unavailable("../nonexistent/relative.so", "'../nonexistent/relative.so'", "is not an absolute path");
    assert_int_equal(chdir(former), 0);
    assert_false(is_loaded(path));
}

static void test_too_old(void **state) {
    (void)state;
    char path[PATH_BYTES];
    compile_driver("old", "-DNO_CREATE", path);
    assert_unavailable(path, "too old for virtual memory management", "cuMemCreate");
    assert_false(is_loaded(path));
}

static void test_init_fails(void **state) {
    (void)state;
    char path[PATH_BYTES];
    tms_driver_t driver;
    tms_error_t error;
    const tms_driver_table_t *table = NULL;
    compile_driver("no_device", "-DINIT_RESULT=100", path);
    assert_unavailable(path, "CUDA_ERROR_NO_DEVICE (100)", "cuInit");
    tms_driver_init(&driver, path, &log_under_test);
    assert_int_equal(tms_driver_load(&driver, &table, &context, &error), TMS_DRIVER_UNAVAILABLE);
    assert_string_equal(error.call, "cuInit");
    assert_string_equal(error.result_name, "CUDA_ERROR_NO_DEVICE");
    assert_int_equal(error.driver_result, 100);
    assert_null(atomic_load(&driver.table));
    /* Whatever cuInit returns, there is no usable driver; without a name the number is reported. */
    compile_driver("broken", "-DINIT_RESULT=2 -DNO_NAMES", path);
    assert_unavailable(path, "an unnamed error (2)", "cuInit");
}

static void test_load(void **state) {
    (void)state;
    char path[PATH_BYTES];
    tms_driver_t driver;
    tms_error_t error;
    const tms_driver_table_t *table = NULL, *again = NULL;
    compile_driver("good", "", path);
    tms_driver_init(&driver, path, &log_under_test);
    assert_false(is_loaded(path)); /* nothing happens before the first load */
    assert_int_equal(tms_driver_load(&driver, &table, &context, &error), TMS_OK);
    assert_int_equal(tms_driver_load(&driver, &again, &context, &error), TMS_OK);
    assert_ptr_equal(table, again);
    assert_int_equal(counter(path, "init_calls"), 1);
    assert_int_equal(counter(path, "init_flags"), 0);
    assert_null(dlsym(RTLD_DEFAULT, "cuMemAddressReserve"));  /* RTLD_LOCAL */
    assert_int_equal(table->cuDevicePrimaryCtxRelease(5), 5); /* the versioned symbol */
    assert_string_equal(tms_driver_result_name(table, CUDA_ERROR_OUT_OF_MEMORY), "CUDA_ERROR_OUT_OF_MEMORY");
    assert_null(tms_driver_result_name(table, (CUresult)12345));
    assert_null(tms_driver_result_name(NULL, CUDA_ERROR_OUT_OF_MEMORY));

    assert_null(table->cuStreamCreate);
    CUstream stream = NULL;
    assert_int_equal(TMS_DRIVER_CALL(table, &context, &error, cuStreamCreate, &stream, 0), TMS_DRIVER_UNAVAILABLE);
    assert_string_equal(error.call, "cuStreamCreate");
    assert_int_equal(error.driver_result, CUDA_ERROR_NOT_FOUND);
    assert_non_null(strstr(error.message, "has no cuStreamCreate"));
    tms_driver_release(&driver);
    assert_null(atomic_load(&driver.table));
}

static pthread_barrier_t barrier;

static void *load(void *argument) {
    const tms_driver_table_t *table = NULL;
    pthread_barrier_wait(&barrier);
    return tms_driver_load(argument, &table, &context, NULL) == TMS_OK ? (void *)(uintptr_t)table : NULL;
}

static void test_threads_agree_on_one_table(void **state) {
    (void)state;
    char path[PATH_BYTES];
    tms_driver_t driver;
    pthread_t threads[THREADS];
    compile_driver("shared", "", path);
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int round = 0; round < 20; round++) {
        tms_driver_init(&driver, path, &log_under_test);
        for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, load, &driver);
        for (int i = 0; i < THREADS; i++) {
            void *table = NULL;
            pthread_join(threads[i], &table);
            assert_non_null(table);
            assert_ptr_equal(table, atomic_load(&driver.table));
        }
        tms_driver_release(&driver);
    }
    pthread_barrier_destroy(&barrier);
}

static CUresult no_memory(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                          unsigned long long flags) {
    (void)handle, (void)size, (void)prop, (void)flags;
    return CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult not_found(CUdeviceptr address, size_t size) {
    (void)address, (void)size;
    return CUDA_ERROR_NOT_FOUND;
}
static CUresult fine(void) { return CUDA_SUCCESS; }

static void test_calls(void **state) {
    (void)state;
    const tms_driver_table_t table = {.cuMemCreate = no_memory, .cuCtxSynchronize = fine, .cuMemUnmap = not_found};
    tms_error_t error;
    memset(&error, 0, sizeof(error));
    assert_int_equal(TMS_DRIVER_CALL(&table, &context, &error, cuCtxSynchronize), TMS_OK);
    assert_string_equal(error.message, "");
    assert_int_equal(TMS_DRIVER_CALL(&table, &context, &error, cuMemCreate, NULL, 4096, NULL, 0), TMS_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(error.call, "cuMemCreate");
    assert_int_equal(error.driver_result, CUDA_ERROR_OUT_OF_MEMORY);
    assert_string_equal(error.result_name, ""); /* the table has no cuGetErrorName */
    /* NOT_FOUND from an existing entry point is the driver's own answer. */
    assert_int_equal(TMS_DRIVER_CALL(&table, &context, &error, cuMemUnmap, 0, 4096), TMS_DRIVER);
    assert_int_equal(TMS_DRIVER_CALL(&table, &context, NULL, cuMemMap, 0, 0, 0, 0, 0), TMS_DRIVER_UNAVAILABLE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_library),    cmocka_unit_test(test_not_a_driver),
        cmocka_unit_test(test_not_a_library), cmocka_unit_test(test_a_relative_path_is_refused),
        cmocka_unit_test(test_too_old),       cmocka_unit_test(test_init_fails),
        cmocka_unit_test(test_load),          cmocka_unit_test(test_threads_agree_on_one_table),
        cmocka_unit_test(test_calls),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
