/* Guards shared_page.c: sums by row, the bound and the rows that are given away, counts of calls, requests, and what fork
 * and exit leave. */
#include "base/shared_page.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "support/shared_page_fixture.h"

#include "base/identity.h"
#include "own_process.h"

enum { REQUEST = false }; /* The call makes a request, and does not withdraw one. */
enum { UNSERVED = false, SERVED = true };

static void release_bytes(tms_shared_row_t row, uint64_t bytes) {
    tms_shared_page_change(&page, row, &(tms_shared_page_change_t){.resident_bytes = 0 - bytes});
    tms_shared_page_remove_allocation(&page, row);
    tms_shared_page_publish(&page);
}

static void the_process_is_described(void **state) {
    (void)state;
    tms_shared_page_role_t role = {.rank_known = 1, .rank = 7, .serves = 1};
    const tms_shared_page_contents_t before = look();
    assert_int_equal(before.process.pid, getpid());
    assert_int_equal(before.process.process_started, tms_identity_started());
    assert_true(before.process.process_started > 0 && before.process.pid_namespace > 0 && before.process.made > 0);
    assert_true(before.process.boot_id[0] != 0);
    assert_string_equal((const char *)before.process.name, "test_shared_page");
    assert_int_equal(before.process.rank_known, 0);
    assert_int_equal(before.process.device_count, 2);
    assert_int_equal(before.devices[1].uuid[1], 5);
    assert_int_equal(before.devices[1].total_bytes, 6);
    assert_int_equal(before.process.row_count, 0);

    tms_shared_page_copy_text(role.name, "trainer");
    tms_shared_page_set_role(&page, &role);
    const tms_shared_page_contents_t after = look();
    assert_string_equal((const char *)after.process.name, "trainer");
    assert_int_equal(after.process.rank, 7);
    assert_int_equal(after.process.serves, 1);
    assert_int_equal(after.process.made, before.process.made);
}

static void rows_are_by_tag_and_device(void **state) {
    (void)state;
    tms_shared_row_t a0 = allocate("a", 0, 5 * MIB), a1 = allocate("a", 1, 7 * MIB);
    assert_int_equal(allocate("a", 0, MIB), a0);
    assert_int_not_equal(a0, a1);
    tms_shared_page_change(&page, a0,
                           &(tms_shared_page_change_t){.resident_bytes = 0 - (uint64_t)MIB,
                                                       .paused_bytes = MIB,
                                                       .slack_bytes = 2,
                                                       .host_backup_bytes = 3,
                                                       .disk_backup_bytes = 4,
                                                       .shared_backup_bytes = 5,
                                                       .damaged = 1});
    assert_int_equal(look().rows[0].paused_bytes, 0); /* not before it is published */
    tms_shared_page_publish(&page);
    const tms_shared_page_contents_t now = look();
    assert_int_equal(now.process.row_count, 2);
    assert_string_equal((const char *)now.rows[0].tag, "a");
    assert_int_equal(now.rows[0].device, 0);
    assert_int_equal(now.rows[0].allocations, 2);
    assert_int_equal(now.rows[0].resident_bytes, 5 * MIB);
    assert_int_equal(now.rows[0].paused_bytes, MIB);
    assert_int_equal(now.rows[0].slack_bytes, 2);
    assert_int_equal(now.rows[0].host_backup_bytes, 3);
    assert_int_equal(now.rows[0].disk_backup_bytes, 4);
    assert_int_equal(now.rows[0].shared_backup_bytes, 5);
    assert_int_equal(now.rows[0].damaged, 1);
    assert_int_equal(now.rows[1].device, 1);
    assert_int_equal(now.rows[1].resident_bytes, 7 * MIB);
    assert_int_equal(now.process.allocations_total, 3);
    release_bytes(a1, 7 * MIB);
    assert_int_equal(look().rows[1].allocations, 0);
    assert_int_equal(look().rows[1].resident_bytes, 0);
    assert_int_equal(look().process.frees_total, 1);
}

static void a_long_tag_is_truncated(void **state) {
    (void)state;
    char name[200];
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    allocate(name, 0, MIB);
    const tms_shared_page_contents_t now = look();
    assert_memory_equal(now.rows[0].tag, name, sizeof now.rows[0].tag);
    assert_int_equal(now.rows[0].device, 0);
}

static void beyond_the_bound_rows_are_given_away_or_summed(void **state) {
    (void)state;
    char name[32];
    tms_shared_row_t rows[TMS_SHARED_PAGE_ROWS];
    const tms_shared_page_outcome_t paused = {.call = TMS_SHARED_PAGE_PAUSE, .succeeded = true, .ended = 1};
    for (int i = 0; i < TMS_SHARED_PAGE_ROWS; i++) {
        snprintf(name, sizeof name, "tag-%d", i);
        rows[i] = allocate(name, 0, MIB);
        assert_int_equal(rows[i], i + 1);
    }
    tms_shared_page_begin_moves(&page, TMS_SHARED_PAGE_PAUSE, 1);
    tms_shared_page_count(&page, rows[5], &paused);
    assert_int_equal(allocate("late", 0, 2 * MIB), 0);
    assert_int_equal(allocate("later", 1, 3 * MIB), 0);
    assert_int_equal(look().others.resident_bytes, 5 * MIB);
    assert_int_equal(look().others.allocations, 2);
    assert_int_equal(look().others.pauses_total, 0);

    release_bytes(rows[5], MIB);
    assert_int_equal(allocate("late", 0, 4 * MIB), rows[5]); /* the row has no allocations; the first one stays in others */
    const tms_shared_page_contents_t now = look();
    assert_string_equal((const char *)now.rows[5].tag, "late");
    assert_int_equal(now.rows[5].resident_bytes, 4 * MIB);
    assert_int_equal(now.rows[5].pauses_total, 0);
    assert_int_equal(now.others.pauses_total, 1); /* totals never fall */
    assert_int_equal(now.others.resident_bytes, 5 * MIB);
    assert_int_equal(now.process.row_count, TMS_SHARED_PAGE_ROWS);
}

static void a_call_is_counted_once_in_each_row(void **state) {
    (void)state;
    tms_shared_row_t a = allocate("a", 0, MIB), b = allocate("b", 0, MIB);
    tms_shared_page_outcome_t outcome = {.call = TMS_SHARED_PAGE_PAUSE, .succeeded = true, .ended = 100, .nanoseconds = 9};
    tms_shared_page_begin_moves(&page, TMS_SHARED_PAGE_PAUSE, 91);
    tms_shared_page_publish(&page);
    assert_int_equal(look().process.running, TMS_SHARED_PAGE_PAUSE);
    assert_int_equal(look().process.running_since, 91);
    for (int i = 0; i < 3; i++) tms_shared_page_count(&page, a, &outcome);
    tms_shared_page_end_moves(&page);
    tms_shared_page_count_call(&page, &outcome);
    outcome = (tms_shared_page_outcome_t){.call = TMS_SHARED_PAGE_RESUME, .succeeded = false, .ended = 200};
    tms_shared_page_begin_moves(&page, TMS_SHARED_PAGE_RESUME, 150);
    tms_shared_page_count(&page, a, &outcome);
    tms_shared_page_count(&page, b, &outcome);
    tms_shared_page_end_moves(&page);
    tms_shared_page_count_call(&page, &outcome);
    tms_shared_page_fail_allocation(&page, b);
    tms_shared_page_publish(&page);
    const tms_shared_page_contents_t now = look();
    assert_int_equal(now.process.running, TMS_SHARED_PAGE_IDLE);
    assert_int_equal(now.rows[0].pauses_total, 1);
    assert_int_equal(now.rows[0].last_pause_ended, 100);
    assert_int_equal(now.rows[0].last_pause_nanoseconds, 9);
    assert_int_equal(now.rows[0].failed_resumes_total, 1);
    assert_int_equal(now.rows[0].last_resume_ended, 0);
    assert_int_equal(now.rows[1].pauses_total, 0);
    assert_int_equal(now.rows[1].failed_resumes_total, 1);
    assert_int_equal(now.rows[1].failed_allocations_total, 1);
    assert_int_equal(now.process.pauses_total, 1);
    assert_int_equal(now.process.failed_resumes_total, 1);
    assert_int_equal(now.process.failed_allocations_total, 1);
}

/* ---- requests ---- */

static void a_request_is_served_once(void **state) {
    (void)state;
    int fd = open(page.file.path, O_RDWR);
    assert_int_equal(tms_shared_page_requests(&page), 0);
    assert_true(tms_shared_page_file_request(fd, TMS_SHARED_PAGE_EVENTS, REQUEST));
    assert_true(tms_shared_page_file_request(fd, TMS_SHARED_PAGE_SNAPSHOT, REQUEST));
    assert_int_equal(tms_shared_page_requests(&page), 3);
    tms_shared_page_serve(&page, TMS_SHARED_PAGE_EVENTS, SERVED, 0);
    assert_int_equal(tms_shared_page_requests(&page), 1 << TMS_SHARED_PAGE_SNAPSHOT);
    tms_shared_page_serve(&page, TMS_SHARED_PAGE_SNAPSHOT, UNSERVED, 28);
    assert_int_equal(tms_shared_page_requests(&page), 0);
    const tms_shared_page_contents_t now = look();
    assert_int_equal(now.served_total[TMS_SHARED_PAGE_EVENTS], 1);
    assert_int_equal(now.served_total[TMS_SHARED_PAGE_SNAPSHOT], 0);
    assert_int_equal(now.unserved_total[TMS_SHARED_PAGE_SNAPSHOT], 1);
    assert_int_equal(now.serve_error[TMS_SHARED_PAGE_SNAPSHOT], 28);
    tms_shared_page_serve(&page, TMS_SHARED_PAGE_KINDS, SERVED, 0); /* no such request */
    close(fd);
}

/* ---- without a page, after a fork, at exit ---- */

static void use_without_page(void) {
    const tms_shared_page_role_t role = {.serves = 1};
    const tms_shared_page_outcome_t outcome = {.call = TMS_SHARED_PAGE_PAUSE, .succeeded = true};
    assert_int_equal(allocate("a", 0, MIB), 0);
    release_bytes(0, MIB);
    tms_shared_page_begin_moves(&page, TMS_SHARED_PAGE_PAUSE, 1);
    tms_shared_page_count(&page, 0, &outcome);
    tms_shared_page_count_call(&page, &outcome);
    tms_shared_page_end_moves(&page);
    tms_shared_page_fail_allocation(&page, 0);
    tms_shared_page_set_role(&page, &role);
    tms_shared_page_serve(&page, TMS_SHARED_PAGE_EVENTS, SERVED, 0);
    assert_int_equal(tms_shared_page_requests(&page), 0);
}

static void without_a_page_nothing_is_done(void **state) {
    (void)state;
    tms_shared_page_release(&page);
    init(PAGE_OFF);
    assert_true(open_page()); /* turned off is no failure */
    assert_false(tms_shared_page_is_open(&page));
    use_without_page();

    tms_shared_page_release(&page);
    init(PAGE_ON);
    page.directory = "relative";
    assert_false(open_page());
    assert_true(open_page()); /* reported once, and not tried again */
    use_without_page();
    assert_int_equal(rmdir(base), 0); /* no file was left */
    assert_int_equal(mkdir(base, 0700), 0);
}

static void at_exit_the_name_goes_and_none_is_made(void **state) {
    (void)state;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", page.file.path);
    tms_shared_page_at_exit(&page);
    assert_int_equal(access(path, F_OK), -1);
    allocate("a", 0, MIB); /* a handler that runs later may still allocate */
    tms_shared_page_release(&page);
    init(PAGE_ON);
    tms_shared_page_at_exit(&page);
    assert_true(open_page());
    assert_false(tms_shared_page_is_open(&page));
}

static void a_child_makes_its_own(void **state) {
    (void)state;
    int status = 0;
    char parents[PATH_MAX];
    tms_shared_page_role_t role = {.serves = 1};
    tms_shared_page_copy_text(role.name, "kept");
    tms_shared_page_set_role(&page, &role);
    allocate("a", 0, MIB);
    snprintf(parents, sizeof parents, "%s", page.file.path);
    pthread_mutex_lock(&page.opening);
    pid_t child = fork();
    if (child == 0) {
        tms_shared_page_after_fork_in_child(&page);
        bool fine = !tms_shared_page_is_open(&page) && page.file.fd == -1 && open_page();
        fine = fine && strcmp(page.file.path, parents) != 0 && allocate("b", 1, 2 * MIB) == 1;
        const tms_shared_page_contents_t own = look();
        fine = fine && own.process.pid == (uint64_t)getpid() && own.process.allocations_total == 1;
        fine = fine && own.process.row_count == 1 && own.rows[0].resident_bytes == 2 * MIB;
        fine = fine && strcmp((const char *)own.process.name, "kept") == 0;
        tms_shared_page_at_exit(&page);
        end_child(fine && access(parents, F_OK) == 0 ? 0 : 1);
    }
    pthread_mutex_unlock(&page.opening);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(look().rows[0].resident_bytes, MIB);
    assert_int_equal(look().process.pid, getpid());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        PAGE_TEST(the_process_is_described),
        PAGE_TEST(rows_are_by_tag_and_device),
        PAGE_TEST(a_long_tag_is_truncated),
        PAGE_TEST(beyond_the_bound_rows_are_given_away_or_summed),
        PAGE_TEST(a_call_is_counted_once_in_each_row),
        PAGE_TEST(a_request_is_served_once),
        PAGE_TEST(without_a_page_nothing_is_done),
        PAGE_TEST(at_exit_the_name_goes_and_none_is_made),
        PAGE_TEST(a_child_makes_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
