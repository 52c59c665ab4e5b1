/* Guards cache.h: a hint changes nothing that a program can observe, whatever the CPU does with it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/cache.h"

enum { PAGE = 4096, PAGES = 3 };

/* Also at the end of a mapping. */
static void contents_stay_as_they_are(void **state) {
    (void)state;
    static const size_t sizes[] = {0, 1, 63, 64, 65, PAGE - 1, PAGE, PAGES * PAGE};
    char *memory = mmap(NULL, (PAGES + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    assert_int_equal(mprotect(memory + PAGES * PAGE, PAGE, PROT_NONE), 0);
    for (size_t i = 0; i < PAGES * PAGE; i++) memory[i] = (char)(i * 7 + i / PAGE);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        tms_cache_demote(memory, sizes[i]);
        tms_cache_demote(memory + PAGES * PAGE - sizes[i], sizes[i]);
    }
    for (size_t i = 0; i < PAGES * PAGE; i++) assert_int_equal(memory[i], (char)(i * 7 + i / PAGE));
    assert_int_equal(munmap(memory, (PAGES + 1) * PAGE), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(contents_stay_as_they_are)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
