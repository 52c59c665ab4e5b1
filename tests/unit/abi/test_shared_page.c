/* Guards shared_page.c: the functions of the table for the shared page, with and without a state and a page. */
#include "abi/entries.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "abi/start.h"
#include "own_process.h"
#include "temporary.h"

/* Arguments of tms_api_set_page_role, tms_api_page_serve and tms_shared_page_file_request. */
enum { NO_RANK, HAS_RANK };
enum { SERVES_NOTHING, SERVES_REQUESTS };
enum { SERVED = 1, REQUEST = false };
static char base[TEMPORARY_BYTES];

#define CHECK(condition)                                                                                                    \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                 \
            _exit(1);                                                                                                       \
        }                                                                                                                   \
    } while (0)

static void use_all(void) {
    char path[PATH_MAX];
    tms_directory_failure_t failure;
    const tms_shared_page_description_t description = {.device_count = 0};
    CHECK(tms_api_page_requests() == 0 && strcmp(tms_api_page_path(), "") == 0);
    tms_api_page_serve(TMS_SHARED_PAGE_SNAPSHOT, SERVED, 0);
    CHECK(tms_state_if_made() == NULL);

    setenv("TMS_SHARED_PAGE", base, 1);
    CHECK(tms_api_page_directory(path, sizeof path) == 1 && strcmp(path, base) == 0);
    CHECK(tms_api_page_directory(path, strlen(base)) == 0); /* without room for the NUL */
    tms_api_set_page_role("trainer", HAS_RANK, 3, SERVES_REQUESTS);
    tms_shared_page_t *page = &tms_state_if_made()->saver.shared_page;
    CHECK(tms_shared_page_open(page, &description, &failure));
    CHECK(strncmp(tms_api_page_path(), base, strlen(base)) == 0 && access(tms_api_page_path(), F_OK) == 0);
    CHECK(page->image->process.rank == 3 && page->image->process.serves == 1);
    CHECK(strcmp((const char *)page->image->process.name, "trainer") == 0);
    tms_api_set_page_role(NULL, NO_RANK, 3, SERVES_NOTHING);
    CHECK(page->image->process.rank == 0 && strcmp((const char *)page->image->process.name, "test_shared_page") == 0);
    CHECK(tms_shared_page_file_request(page->file.fd, TMS_SHARED_PAGE_EVENTS, REQUEST));
    CHECK(tms_api_page_requests() == 1 << TMS_SHARED_PAGE_EVENTS);
    tms_api_page_serve(TMS_SHARED_PAGE_EVENTS, SERVED, 0);
    CHECK(tms_api_page_requests() == 0);
}

static void every_function(void **state) {
    (void)state;
    assert_non_null(make_temporary_directory(base, "page"));
    assert_exits(use_all);
    assert_int_equal(rmdir(base), 0); /* the page went at exit */
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_function)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
