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
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"

enum { BYTES = 1000 };

static struct {
    int error;         /* what getrandom fails with, 0 for none */
    int interruptions; /* EINTR this often before that */
    size_t most;       /* bytes that one call gives, 0 for all */
    time_t seconds;    /* what the clock says, 0 for the time */
    unsigned flags;    /* of the last call */
    uint64_t bytes;    /* what a call for a number gives, 0 for what the kernel gives */
} fault;

ssize_t getrandom(void *memory, size_t bytes, unsigned flags) {
    fault.flags = flags;
    errno = fault.interruptions > 0 ? EINTR : fault.error;
    if (fault.interruptions > 0) fault.interruptions--;
    if (errno != 0) return -1;
    if (fault.bytes && bytes == sizeof fault.bytes) {
        memcpy(memory, &fault.bytes, fault.most ? fault.most : bytes);
        return (ssize_t)(fault.most ? fault.most : bytes);
    }
    return syscall(SYS_getrandom, memory, fault.most && bytes > fault.most ? fault.most : bytes, flags);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (fault.seconds == 0) return (int)syscall(SYS_clock_gettime, clock, now);
    *now = (struct timespec){.tv_sec = fault.seconds};
    return 0;
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

static void a_number_is_the_kernels(void **state) {
    (void)state;
    fault.bytes = 0x0123456789abcdefu;
    assert_int_equal(tms_random_number(), 0x0123456789abcdefu);
    assert_int_equal(fault.flags, GRND_NONBLOCK);
}

/* Without the kernel's numbers, the number is the time, with an address in the low bits. */
static void assert_number_of_the_time(void) {
    enum { ADDRESS_BITS = 48 };
    uint64_t number = tms_random_number();
    assert_int_equal(number >> ADDRESS_BITS, (uint64_t)fault.seconds * TMS_NANOSECONDS >> ADDRESS_BITS);
    assert_int_not_equal(number, (uint64_t)fault.seconds * TMS_NANOSECONDS);
}

static void a_number_needs_no_kernel(void **state) {
    (void)state;
    const int errors[] = {EAGAIN, ENOSYS, EINTR};
    fault.seconds = 5000000000;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        fault.error = errors[i];
        assert_number_of_the_time();
    }
    fault.error = 0;
    fault.bytes = UINT64_MAX;
    fault.most = 7;
    assert_number_of_the_time();
}

int main(void) {
#define RANDOM_TEST(test) cmocka_unit_test_setup(test, reset)
    const struct CMUnitTest tests[] = {
        RANDOM_TEST(all_bytes_are_filled),
        RANDOM_TEST(a_failure_is_returned),
        RANDOM_TEST(a_number_is_the_kernels),
        RANDOM_TEST(a_number_needs_no_kernel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
