/* Guards random.c: all bytes are random, and calls of the kernel that are interrupted or fail. */
#include "base/random.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

enum { BYTES = 1000 };

static struct {
    int error;         /* what getrandom fails with, 0 for none */
    int interruptions; /* EINTR this often before that */
    size_t most;       /* bytes that one call gives, 0 for all */
} fault;

ssize_t getrandom(void *memory, size_t bytes, unsigned flags) {
    errno = fault.interruptions > 0 ? EINTR : fault.error;
    if (fault.interruptions > 0) fault.interruptions--;
    if (errno != 0) return -1;
    return syscall(SYS_getrandom, memory, fault.most && bytes > fault.most ? fault.most : bytes, flags);
}

static int reset(void **state) {
    (void)state;
    memset(&fault, 0, sizeof fault);
    return 0;
}

static void all_bytes_are_filled(void **state) {
    (void)state;
    unsigned char seen[BYTES] = {0};
    fault.most = 7;
    /* A byte stays 0 in all of 16 rounds with a probability of 2^-128. */
    for (int round = 0; round < 16; round++) {
        unsigned char memory[BYTES + 1];
        memory[BYTES] = 0x5a;
        fault.interruptions = 3;
        assert_int_equal(tms_random_fill(memory, BYTES), 0);
        assert_int_equal(memory[BYTES], 0x5a);
        for (size_t i = 0; i < BYTES; i++) seen[i] |= memory[i];
    }
    for (size_t i = 0; i < BYTES; i++) assert_int_not_equal(seen[i], 0);
}

static void a_failure_is_returned(void **state) {
    (void)state;
    char memory[BYTES];
    fault.error = ENOSYS;
    assert_int_equal(tms_random_fill(memory, BYTES), ENOSYS);
}

static void a_number_needs_no_kernel(void **state) {
    (void)state;
    assert_true(tms_random_number() != tms_random_number());
    fault.error = EAGAIN;
    assert_true(tms_random_number() != 0);
}

int main(void) {
#define RANDOM_TEST(test) cmocka_unit_test_setup(test, reset)
    const struct CMUnitTest tests[] = {
        RANDOM_TEST(all_bytes_are_filled),
        RANDOM_TEST(a_failure_is_returned),
        RANDOM_TEST(a_number_needs_no_kernel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
