/* A process without a free descriptor: every open fails with EMFILE. */
#ifndef TMS_TESTS_DESCRIPTORS_H
#define TMS_TESTS_DESCRIPTORS_H

#include <sys/resource.h>

typedef struct taken_descriptors {
    struct rlimit found;
} taken_descriptors_t;

static inline taken_descriptors_t take_descriptors(void) {
    taken_descriptors_t taken;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &taken.found), 0);
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = taken.found.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    return taken;
}

static inline void give_descriptors_back(taken_descriptors_t taken) {
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &taken.found), 0);
}

#endif
