/* Guards size_limit.c: the limit of the process for the size of a file. */
#include "base/size_limit.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>

#include <cmocka.h>

static void a_size_beyond_the_limit(void **state) {
    (void)state;
    struct rlimit before, small = {.rlim_cur = 4096, .rlim_max = RLIM_INFINITY};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small.rlim_max = before.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int least = tms_size_limit_check(4096), more = tms_size_limit_check(4097);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(least, 0);
    assert_int_equal(more, EFBIG);
    if (before.rlim_cur == RLIM_INFINITY) assert_int_equal(tms_size_limit_check(UINT64_MAX), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_size_beyond_the_limit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
