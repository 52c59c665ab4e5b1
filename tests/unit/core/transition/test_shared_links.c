/* Guards that a link whose removal fails is logged once, and removed by a later call. */
#include "support/shared_store.h"

#include <dlfcn.h>
#include <errno.h>

#include "captured_stderr.h"
#include "core/transition/adopt.h"
#include "core/transition/publish.h"

static int refused_descriptor = -1; /* names of this directory cannot be removed */
static bool refuses_directories;    /* no directory can be removed */

int unlinkat(int directory, const char *name, int flags) {
    int (*real)(int, const char *, int) = (int (*)(int, const char *, int))(uintptr_t)dlsym(RTLD_NEXT, "unlinkat");
    if (directory == refused_descriptor || (refuses_directories && flags & AT_REMOVEDIR)) {
        errno = EACCES;
        return -1;
    }
    return real(directory, name, flags);
}

static size_t holder_count(fixture_t *f) {
    char holder[PATH_BYTES];
    snprintf(holder, sizeof holder, "holders/%s", store_of(f)->folder.holder_name);
    return list(holder).count;
}

/* Gives up two objects while names of `directory` cannot be removed. Returns what was logged. */
static const char *give_up_two(fixture_t *f, const int *directory, tms_shared_name_t *kept) {
    static char text[TEXT_BYTES];
    tms_error_t error;
    const uint64_t one = allocate_filled(f, "a", KEPT, BYTES, 1), two = allocate_filled(f, "a", KEPT, BYTES, 2);
    const uint64_t other = allocate_filled(f, "b", KEPT, BYTES, 3);
    ASSERT_OK(pause_tag(f, "b", &error), error);
    *kept = only_object();
    ASSERT_OK(pause_tag(f, "a", &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    settle(f);
    f->log.level = TMS_LOG_WARNING;
    const captured_stderr_t captured = capture_begin();
    refused_descriptor = *directory;
    ASSERT_OK(tms_free_address(&f->saver, one, &error), error);
    ASSERT_OK(tms_free_address(&f->saver, two, &error), error);
    refused_descriptor = -1;
    assert_true(capture_end(captured, text, sizeof text) > 0);
    assert_objects(3);
    assert_filled(other, BYTES, 3);
    return text;
}

static void assert_logged_once(const char *text) {
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, folder));
    assert_non_null(strstr(text, "/objects/"));
    assert_non_null(strstr(text, "unlinkat: Permission denied"));
}

static void a_link_that_stays_is_removed_by_the_next_call(void **state) {
    fixture_t *f = *state;
    tms_shared_name_t kept;
    assert_logged_once(give_up_two(f, &store_of(f)->folder.holder, &kept));
    assert_int_equal(holder_count(f), 4); /* three links and the lock */
    assert_int_equal(held(f), BYTES);
    cycle_copying(f, 0, BYTES);
    assert_int_equal(holder_count(f), 2);
    assert_string_equal(only_object().text, kept.text);
}

static void an_object_that_stays_is_removed_by_the_next_call(void **state) {
    fixture_t *f = *state;
    tms_shared_name_t kept;
    assert_logged_once(give_up_two(f, &store_of(f)->folder.objects, &kept));
    assert_int_equal(holder_count(f), 2);
    cycle_copying(f, 0, BYTES);
    assert_string_equal(only_object().text, kept.text);
}

/* The second try fails as well, and is not logged again. */
static void a_link_is_tried_again_until_it_is_gone(void **state) {
    fixture_t *f = *state;
    char text[TEXT_BYTES];
    tms_shared_name_t kept;
    (void)give_up_two(f, &store_of(f)->folder.holder, &kept);
    const captured_stderr_t captured = capture_begin();
    refused_descriptor = store_of(f)->folder.holder;
    cycle_copying(f, 0, BYTES);
    refused_descriptor = -1;
    (void)capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 0);
    assert_objects(3);
    cycle_copying(f, 0, BYTES);
    assert_string_equal(only_object().text, kept.text);
}

/* Publishes a block as `name`. */
static void publish(fixture_t *f, uint64_t address) {
    const tms_selection_t selection = {0};
    const tms_shared_piece_t piece = {.address = address, .bytes = BYTES};
    tms_error_t error;
    uint64_t written;
    ASSERT_OK(tms_publish_perform(&f->saver, &selection, &piece, 1, "name", "{}", &written, &error), error);
}

/* The one that a publication has replaced. */
static void a_directory_that_stays_is_removed_by_the_next_call(void **state) {
    fixture_t *f = *state;
    const uint64_t address = allocate_filled(f, "a", TMS_BACKUP_NONE, BYTES, 1);
    publish(f, address);
    add_one(address);
    refuses_directories = true;
    publish(f, address);
    refuses_directories = false;
    assert_int_equal(holder_count(f), 4); /* two links, the directory and the lock */
    publish(f, address);
    assert_int_equal(holder_count(f), 3);
    assert_int_equal(list("names").count, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_link_that_stays_is_removed_by_the_next_call),
        TEST(an_object_that_stays_is_removed_by_the_next_call),
        TEST(a_link_is_tried_again_until_it_is_gone),
        TEST(a_directory_that_stays_is_removed_by_the_next_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
