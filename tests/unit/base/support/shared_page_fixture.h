/* One shared page in a directory of its own, for the tests of shared_page.c. */
#ifndef TMS_TEST_SHARED_PAGE_FIXTURE_H
#define TMS_TEST_SHARED_PAGE_FIXTURE_H

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/shared_page.h"
#include "temporary.h"

enum { MIB = 1 << 20 };

static char base[TEMPORARY_BYTES];
static tms_shared_page_t page;
static tms_tag_table_t tags;

typedef enum page_choice { PAGE_OFF = false, PAGE_ON = true } page_choice_t;

static inline void init(page_choice_t wanted) {
    tms_error_t error;
    memset(&page, 0, sizeof page);
    assert_int_equal(tms_shared_page_init(&page, wanted, base, &error), TMS_OK);
}

static inline bool open_page(void) {
    static const tms_shared_page_description_t description = {
        .device_count = 2, .devices = {{.uuid = {1, 2}, .total_bytes = 3}, {.uuid = {4, 5}, .total_bytes = 6}}};
    tms_directory_failure_t failure;
    return tms_shared_page_open(&page, &description, &failure);
}

static inline int make(void **state) {
    (void)state;
    if (!make_temporary_directory(base, "page")) return -1;
    tms_tag_table_init(&tags);
    init(PAGE_ON);
    return open_page() ? 0 : -1;
}

static inline int release(void **state) {
    (void)state;
    tms_shared_page_release(&page);
    tms_tag_table_release(&tags);
    return remove_temporary_directory(base);
}

static inline const tms_tag_t *tag_of(const char *name) {
    tms_tag_t *tag = NULL;
    assert_int_equal(tms_tag_intern(&tags, name, &tag, NULL), TMS_OK);
    return tag;
}

static inline tms_shared_page_contents_t look(void) {
    tms_shared_page_contents_t copy;
    int fd = open(page.file.path, O_RDONLY);
    assert_int_equal(tms_shared_page_file_read(fd, &copy), TMS_SHARED_PAGE_READ);
    close(fd);
    return copy;
}

static inline tms_shared_row_t allocate(const char *tag, int device, uint64_t bytes) {
    tms_shared_row_t row = tms_shared_page_row(&page, tag_of(tag), device);
    tms_shared_page_add_allocation(&page, row);
    tms_shared_page_change(&page, row, &(tms_shared_page_change_t){.resident_bytes = bytes});
    tms_shared_page_publish(&page);
    return row;
}

#define PAGE_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)

#endif
