/* Guards tag.c: a name is one tag, found quickly among many. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/tag.h"

enum { NAME_BYTES = 32, MANY_TAGS = 20000, STEPS_A_SEARCH = 4 };

static tms_tag_table_t table;
static tms_error_t error;

static int make(void **state) {
    (void)state;
    tms_tag_table_init(&table);
    return 0;
}

static int release(void **state) {
    (void)state;
    tms_tag_table_release(&table);
    return 0;
}

static const char *name_of(char *name, int number) {
    (void)snprintf(name, NAME_BYTES, "request-%08d", number);
    return name;
}

static void tags_are_interned(void **state) {
    (void)state;
    char name[] = "weights";
    tms_tag_t *first = NULL, *second = NULL, *other = NULL;
    assert_null(tms_tag_find(&table, name));
    assert_int_equal(tms_tag_intern(&table, name, &first, &error), TMS_OK);
    assert_int_equal(tms_tag_intern(&table, "weights", &second, &error), TMS_OK);
    assert_int_equal(tms_tag_intern(&table, "kv_\xC3\xA9", &other, &error), TMS_OK);
    assert_ptr_equal(first, second);
    assert_ptr_not_equal(first, other);
    name[0] = 'X'; /* the name was copied */
    assert_string_equal(first->name, "weights");
    assert_string_equal(other->name, "kv_\xC3\xA9");
    assert_ptr_equal(tms_tag_find(&table, "weights"), first);
    assert_ptr_equal(tms_tag_find(&table, "kv_\xC3\xA9"), other);
    assert_null(tms_tag_find(&table, "weight"));
    assert_null(tms_tag_find(&table, NULL));
    assert_int_equal(first->paused, 0);
    assert_int_equal(first->pause_epoch, 0);
    assert_false(first->used);
}

static void bad_names(void **state) {
    (void)state;
    tms_tag_t *tag = (tms_tag_t *)&table;
    assert_int_equal(tms_tag_intern(&table, NULL, &tag, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_tag_intern(&table, "", &tag, &error), TMS_INVALID_ARGUMENT);
    assert_ptr_equal(tag, &table);
    assert_int_equal(table.count, 0);
    assert_non_null(strstr(error.message, "non-empty"));
    assert_string_equal(error.operation, "region");
}

static void a_tag_is_found_at_once_among_many(void **state) {
    (void)state;
    tms_tag_t *known[MANY_TAGS / 1000];
    char name[NAME_BYTES];
    for (int i = 0; i < MANY_TAGS; i++) {
        tms_tag_t *made = NULL;
        assert_int_equal(tms_tag_intern(&table, name_of(name, i), &made, &error), TMS_OK);
        if (i % 1000 == 0) known[i / 1000] = made;
    }
    assert_true(table.steps < (uint64_t)STEPS_A_SEARCH * 2 * MANY_TAGS); /* each is looked up, and then inserted */
    uint64_t before = table.steps;
    for (int i = 0; i < 2 * MANY_TAGS; i++) {
        const tms_tag_t *found = tms_tag_find(&table, name_of(name, i));
        if (i >= MANY_TAGS) {
            assert_null(found);
            continue;
        }
        assert_string_equal(found->name, name);
        if (i % 1000 == 0) assert_ptr_equal(found, known[i / 1000]);
    }
    assert_true(table.steps - before < (uint64_t)STEPS_A_SEARCH * 2 * MANY_TAGS);
    assert_int_equal(table.count, MANY_TAGS);
    assert_true(table.index->size >= 2 * table.count);
}

static void tags_are_listed_from_the_newest_to_the_oldest(void **state) {
    (void)state;
    char name[NAME_BYTES];
    enum { SOME = 100 };
    int number = SOME;
    for (int i = 0; i < SOME; i++) {
        tms_tag_t *made = NULL;
        assert_int_equal(tms_tag_intern(&table, name_of(name, i), &made, &error), TMS_OK);
    }
    const tms_tag_t *tag = table.first;
    for (; tag && number > 0; tag = tag->next) assert_string_equal(tag->name, name_of(name, --number));
    assert_int_equal(number, 0);
    assert_null(tag);
}

static void rows_say_which_tags_were_used(void **state) {
    (void)state;
    enum { SOME = 3, ROOM = 5 };
    char name[NAME_BYTES];
    tms_tag_row_t rows[ROOM];
    for (int i = 0; i < SOME; i++) {
        tms_tag_t *made = NULL;
        assert_int_equal(tms_tag_intern(&table, name_of(name, i), &made, &error), TMS_OK);
        atomic_store(&made->used, i == 1);
    }
    assert_int_equal(tms_tag_list(&table, NULL, 0), SOME);
    memset(rows, 0, sizeof rows);
    assert_int_equal(tms_tag_list(&table, rows, 2), SOME);
    assert_null(rows[2].name);
    assert_int_equal(tms_tag_list(&table, rows, ROOM), SOME);
    for (int i = 0; i < SOME; i++) {
        assert_string_equal(rows[i].name, name_of(name, SOME - 1 - i));
        assert_int_equal(rows[i].used, i == 1);
    }
    assert_null(rows[SOME].name);
}

int main(void) {
#define TAG_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        TAG_TEST(tags_are_interned),
        TAG_TEST(bad_names),
        TAG_TEST(a_tag_is_found_at_once_among_many),
        TAG_TEST(tags_are_listed_from_the_newest_to_the_oldest),
        TAG_TEST(rows_say_which_tags_were_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
