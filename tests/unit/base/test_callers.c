/* Guards callers.c: the object of an address, its path, and that nothing is known of places where an object was unloaded. */
#include "base/callers.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static uintptr_t own_code(void) { return (uintptr_t)own_code; }

static void the_object_of_an_address(void **state) {
    (void)state;
    tms_caller_object_t object;
    char program[PATH_MAX] = "";
    assert_true(readlink("/proc/self/exe", program, sizeof program - 1) > 0);
    tms_caller_find(own_code(), &object);
    assert_string_equal(object.path, program);
    assert_true(object.begin <= own_code() && own_code() < object.end);
    tms_caller_find((uintptr_t)dlsym(RTLD_NEXT, "gnu_get_libc_version"), &object);
    assert_non_null(strstr(object.path, "libc.so"));
    tms_caller_find((uintptr_t)&object, &object); /* the stack */
    assert_string_equal(object.path, "");
    assert_int_equal(object.end, 0);
}

static void a_caller_is_known_once(void **state) {
    (void)state;
    tms_callers_t callers;
    tms_caller_object_t object;
    tms_callers_init(&callers);
    assert_int_equal(tms_callers_cached(&callers, own_code(), tms_callers_unloads()), TMS_NO_CALLER);
    tms_caller_find(own_code(), &object);
    int32_t caller = tms_callers_remember(&callers, &object);
    assert_int_equal(tms_callers_remember(&callers, &object), caller);
    assert_int_equal(callers.count, 1);
    assert_int_equal(callers.range_count, 1);
    assert_int_equal(tms_callers_cached(&callers, object.begin, object.unloads), caller);
    assert_int_equal(tms_callers_cached(&callers, object.end - 1, object.unloads), caller);
    assert_int_equal(tms_callers_cached(&callers, object.end, object.unloads), TMS_NO_CALLER);
    assert_string_equal(tms_callers_path(&callers, caller), object.path);
    tms_callers_release(&callers);
}

static void nothing_is_known_after_an_unload(void **state) {
    (void)state;
    const char *library = getenv("TMS_CUDA_DRIVER");
    tms_callers_t callers;
    tms_caller_object_t before, after;
    tms_callers_init(&callers);
    tms_caller_find(own_code(), &before);
    int32_t caller = tms_callers_remember(&callers, &before);
    void *loaded = dlopen(library, RTLD_LAZY);
    assert_non_null(loaded);
    /* An object that is loaded changes nothing. */
    assert_int_equal(tms_callers_cached(&callers, own_code(), tms_callers_unloads()), caller);
    assert_int_equal(dlclose(loaded), 0);
    assert_true(tms_callers_unloads() > before.unloads);
    assert_int_equal(tms_callers_cached(&callers, own_code(), tms_callers_unloads()), TMS_NO_CALLER);
    tms_caller_find(own_code(), &after);
    assert_int_equal(tms_callers_remember(&callers, &after), caller);
    assert_int_equal(tms_callers_cached(&callers, own_code(), tms_callers_unloads()), caller);
    /* What another thread has found before the unload is late: only its path is of use. */
    before.begin = 1;
    before.end = 2;
    assert_int_equal(tms_callers_remember(&callers, &before), caller);
    assert_int_equal(tms_callers_cached(&callers, 1, tms_callers_unloads()), TMS_NO_CALLER);
    tms_callers_release(&callers);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_object_of_an_address),
        cmocka_unit_test(a_caller_is_known_once),
        cmocka_unit_test(nothing_is_known_after_an_unload),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
