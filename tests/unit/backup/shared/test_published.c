/* Guards published names: what a publication makes, replaces and removes, what a publisher leaves that fails or is killed
 * before any of its system calls, and that the clean-up removes what has lost its manifest, and nothing else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backup/shared/published.h"
#include "support/killed_steps.h"

enum { TEXT_BYTES = 4096 };

/* ---- calls ---- */

/* Publishes the objects of these numbers. The contents of the manifest are `text`. */
static tms_status_t publish(const tms_shared_folder_t *folder, const char *name, const unsigned *numbers, size_t count,
                            const char *text) {
    tms_shared_name_t objects[8];
    for (size_t i = 0; i < count; i++) objects[i] = name_of(numbers[i]);
    bool left;
    return tms_shared_publish(folder, name, objects, count, text, &left, &context, &error);
}

static void publish_one(const tms_shared_folder_t *folder, const char *name, unsigned number, const char *text) {
    assert_true(get_object(folder, number, NULL));
    if (publish(folder, name, &number, 1, text) != TMS_OK) fail_msg("%s", error.message);
}

static const char *path_of(const char *name, const char *file) {
    char path[96];
    snprintf(path, sizeof path, "names/%s%s%s", name, file[0] ? "/" : "", file);
    return below(path);
}

/* The manifest, or NULL if there is none. */
static const char *manifest_of(const char *name) {
    static char text[TEXT_BYTES];
    int fd = open(path_of(name, TMS_SHARED_MANIFEST), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    ssize_t bytes = read(fd, text, sizeof text - 1);
    close(fd);
    assert_true(bytes >= 0);
    text[bytes] = 0;
    return text;
}

static void assert_published(const char *name, unsigned number, const char *text) {
    char expected[TEXT_BYTES];
    snprintf(expected, sizeof expected, "{\"objects\":[\"%s\"],\n\"contents\":%s}\n", name_of(number).text, text);
    assert_non_null(manifest_of(name));
    assert_string_equal(manifest_of(name), expected);
    assert_int_equal(count_names(path_of(name, "")), 2);
    assert_true(exists(path_of(name, name_of(number).text)));
    assert_true(exists(object_path(number, "")));
}

/* ---- tests ---- */

static void a_name_links_its_objects(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    assert_true(get_object(folder, 2, NULL));
    publish_one(folder, "name", 1, "{}");
    assert_published("name", 1, "{}");
    assert_int_equal(mode_of(path_of("name", TMS_SHARED_MANIFEST)), 0400);
    assert_int_equal(mode_of(path_of("name", "")), 0700);
    assert_int_equal(links_of(object_path(1, "")), 3);
    close_folder(folder);
    assert_int_equal(links_of(object_path(1, "")), 2);
    assert_false(exists(object_path(2, "")));
    assert_int_equal(count_names(below("holders")), 0);
    /* Another process finds it, and its clean-up leaves it. */
    folder = open_folder();
    tms_shared_folder_clean(folder, &quiet);
    bool written = true;
    assert_true(get_object(folder, 1, &written));
    assert_false(written);
    close_folder(folder);
    assert_published("name", 1, "{}");
}

static void the_manifest_lists_the_objects_in_order(void **state) {
    (void)state;
    static const unsigned numbers[] = {2, 1, 2};
    tms_shared_folder_t *folder = open_folder();
    char expected[TEXT_BYTES];
    assert_true(get_object(folder, 1, NULL) && get_object(folder, 2, NULL));
    assert_int_equal(publish(folder, "name", numbers, 3, "1"), TMS_OK);
    snprintf(expected, sizeof expected, "{\"objects\":[\"%s\",\"%s\",\"%s\"],\n\"contents\":1}\n", name_of(2).text,
             name_of(1).text, name_of(2).text);
    assert_string_equal(manifest_of("name"), expected);
    assert_int_equal(publish(folder, "empty", NULL, 0, "2"), TMS_OK);
    assert_string_equal(manifest_of("empty"), "{\"objects\":[],\n\"contents\":2}\n");
    close_folder(folder);
}

static void a_new_publication_replaces_the_old_one(void **state) {
    (void)state;
    tms_shared_folder_t *one = open_folder(), *two = open_folder();
    publish_one(one, "name", 1, "1");
    publish_one(two, "name", 2, "2");
    assert_published("name", 2, "2");
    assert_int_equal(links_of(object_path(1, "")), 2); /* the first publisher still holds it */
    publish_one(two, "other", 1, "1");
    publish_one(one, "name", 3, "3");
    assert_published("name", 3, "3");
    close_folder(one);
    close_folder(two);
    assert_published("name", 3, "3");
    assert_published("other", 1, "1");
    assert_false(exists(object_path(2, "")));
    assert_int_equal(count_names(below("names")), 2);
    assert_int_equal(count_names(below("holders")), 0);
}

static void an_object_that_the_holder_has_not_is_an_error(void **state) {
    (void)state;
    static const unsigned numbers[] = {1, 2};
    tms_shared_folder_t *folder = open_folder();
    publish_one(folder, "name", 1, "1");
    assert_int_equal(publish(folder, "name", numbers, 2, "2"), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, name_of(2).text));
    assert_published("name", 1, "1");
    assert_int_equal(count_names(holder_path(folder, "")), 2); /* the object and the lock */
    close_folder(folder);
}

static void an_object_that_lost_its_name_gets_it_again(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    assert_true(get_object(folder, 1, NULL));
    assert_int_equal(unlink(object_path(1, "")), 0);
    static const unsigned number = 1;
    assert_int_equal(publish(folder, "name", &number, 1, "1"), TMS_OK);
    assert_int_equal(links_of(object_path(1, "")), 3);
    close_folder(folder);
}

static void a_file_in_place_of_a_name_is_an_error(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    static const unsigned number = 1;
    publish_one(folder, "other", 1, "1");
    put_file(path_of("name", ""), "", 0600);
    tms_status_t status = publish(folder, "name", &number, 1, "1");
    /* The exchange moves the file into the holder, where it goes with it. */
    assert_true(status == TMS_OK || status == TMS_BACKUP_IO);
    close_folder(folder);
    assert_int_equal(count_names(below("holders")), 0);
}

static void a_name_without_a_manifest_goes(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    publish_one(folder, "kept", 1, "1");
    publish_one(folder, "gone", 2, "2");
    drop(folder, 2);
    assert_int_equal(unlink(path_of("gone", TMS_SHARED_MANIFEST)), 0);
    tms_shared_folder_clean(folder, &quiet);
    assert_false(exists(path_of("gone", "")));
    assert_false(exists(object_path(2, "")));
    assert_published("kept", 1, "1");
    close_folder(folder);
}

/* Two processes publish one name in a loop, and a third cleans up. */
static void publish_often(const child_t *parent) {
    static tms_shared_folder_t folder;
    const unsigned number = 1 + (unsigned)getpid() % 2;
    char text[16];
    snprintf(text, sizeof text, "%u", number);
    CHECK(tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_OK);
    CHECK(get_object(&folder, number, NULL));
    tell(parent);
    CHECK(hear(parent));
    for (int i = 0; i < 200; i++) CHECK(publish(&folder, "name", &number, 1, text) == TMS_OK);
    tms_shared_folder_close(&folder, &quiet);
}

static void one_of_two_publishers_wins(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    assert_int_equal(mkdir(below("names"), 0700), 0);
    const child_t children[] = {start(publish_often), start(publish_often)};
    for (size_t i = 0; i < 2; i++) assert_true(hear(&children[i]));
    for (size_t i = 0; i < 2; i++) tell(&children[i]);
    for (int i = 0; i < 500; i++) tms_shared_folder_clean(folder, &quiet);
    for (size_t i = 0; i < 2; i++) assert_ends_well(&children[i]);
    const unsigned winner = strstr(manifest_of("name"), "\"contents\":1}") ? 1 : 2;
    assert_published("name", winner, winner == 1 ? "1" : "2");
    close_folder(folder);
    assert_int_equal(count_names(below("holders")), 0);
    assert_int_equal(count_names(below("objects")), 1);
    assert_int_equal(count_names(below("names")), 1);
}

/* ---- kills ---- */

static void publish_twice(void) {
    static tms_shared_folder_t folder;
    static const unsigned numbers[] = {2, 3};
    CHECK(tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_OK);
    CHECK(get_object(&folder, 2, NULL) && get_object(&folder, 3, NULL));
    CHECK(publish(&folder, "name", &numbers[0], 1, "2") == TMS_OK);
    CHECK(publish(&folder, "name", &numbers[1], 1, "3") == TMS_OK);
    tms_shared_folder_close(&folder, &quiet);
}

/* There are no objects but that of the name, and nothing else of the dead process. */
static void assert_old_or_new(bool had_name) {
    const char *text = manifest_of("name");
    unsigned number = 0;
    if (text) number = strstr(text, "\"contents\":1}") ? 1 : strstr(text, "\"contents\":2}") ? 2 : 3;
    assert_true(!had_name || number > 0);
    if (number > 0) assert_published("name", number, number == 1 ? "1" : number == 2 ? "2" : "3");
    assert_int_equal(count_names(below("objects")), number > 0);
    if (number > 0) assert_int_equal(links_of(object_path(number, "")), 2);
    assert_int_equal(count_names(below("holders")), 0);
    assert_int_equal(exists(below("names")) ? count_names(below("names")) : 0, number > 0);
}

static void run(bool has_name) {
    bool killed = true;
    for (unsigned calls = has_name ? 0 : step() / 2; killed; calls += step()) {
        snprintf(root, sizeof root, "%.200s/store %u", base, calls);
        tms_shared_folder_t *first = open_folder();
        if (has_name) publish_one(first, "name", 1, "1");
        close_folder(first);
        pid_t pid = start_traced(publish_twice);
        if (!pid) skip();
        killed = kill_after(pid, calls);
        tms_shared_folder_t *second = open_folder();
        tms_shared_folder_clean(second, &quiet);
        close_folder(second);
        assert_old_or_new(has_name);
        assert_int_equal(remove_temporary_directory(root), 0);
    }
}

static void a_killed_publisher_leaves_the_old_or_the_new_name(void **state) {
    (void)state;
    run(true);
}

static void a_killed_first_publisher_leaves_a_name_or_none(void **state) {
    (void)state;
    run(false);
}

int main(void) {
#define PUBLISHED_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        PUBLISHED_TEST(a_name_links_its_objects),
        PUBLISHED_TEST(the_manifest_lists_the_objects_in_order),
        PUBLISHED_TEST(a_new_publication_replaces_the_old_one),
        PUBLISHED_TEST(an_object_that_the_holder_has_not_is_an_error),
        PUBLISHED_TEST(an_object_that_lost_its_name_gets_it_again),
        PUBLISHED_TEST(a_file_in_place_of_a_name_is_an_error),
        PUBLISHED_TEST(a_name_without_a_manifest_goes),
        PUBLISHED_TEST(one_of_two_publishers_wins),
        PUBLISHED_TEST(a_killed_publisher_leaves_the_old_or_the_new_name),
        PUBLISHED_TEST(a_killed_first_publisher_leaves_a_name_or_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
