/* Guards log_queue.c: which lines wait, in which order, and that lines which no call takes are not lost. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "captured_stderr.h"

static char output[1 << 16];
static tms_log_queue_t queue;
static tms_log_t log_under_test;

static int begin(void **state) {
    (void)state;
    queue = (tms_log_queue_t){.newest = NULL};
    tms_log_init(&log_under_test, TMS_LOG_INFO);
    log_under_test.queue = &queue;
    return 0;
}

static void write_line(const char *text) { tms_log_write(&log_under_test, TMS_LOG_WARNING, "%s", text); }

/* Takes all lines, separated by commas. */
static const char *take(void) {
    static char all[4096];
    all[0] = '\0';
    for (tms_log_line_t *next, *line = tms_log_queue_take(&queue); line; line = next) {
        next = line->next;
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%d:%s", all[0] ? "," : "", (int)line->level, line->text);
        free(line);
    }
    return all;
}

static void lines_wait_only_while_a_call_is_under_way(void **state) {
    (void)state;
    captured_stderr_t captured = capture_begin();
    write_line("before");
    tms_log_queue_open(&queue);
    write_line("one");
    tms_log_queue_open(&queue); /* another thread's call */
    tms_log_write(&log_under_test, TMS_LOG_INFO, "tw\no");
    tms_log_queue_close(&queue);
    tms_log_write(&log_under_test, TMS_LOG_ERROR, "three");
    tms_log_write(&log_under_test, TMS_LOG_DEBUG, "not logged");
    tms_log_queue_close(&queue);
    write_line("after");
    capture_end(captured, output, sizeof output);
    assert_string_equal(take(), "2:one,3:tw o,1:three");
    assert_string_equal(take(), "");
    assert_int_equal(count_lines(output), 2);
    assert_non_null(strstr(output, "warning: before\n"));
    assert_non_null(strstr(output, "warning: after\n"));
}

static void a_full_queue_overflows_to_stderr(void **state) {
    (void)state;
    captured_stderr_t captured = capture_begin();
    tms_log_queue_open(&queue);
    for (int i = 0; i < TMS_LOG_QUEUE_LINES + 3; i++) write_line("x");
    capture_end(captured, output, sizeof output);
    assert_int_equal(count_lines(output), 3);
    tms_log_line_t *line = tms_log_queue_take(&queue);
    int taken = 0;
    for (tms_log_line_t *next; line; line = next, taken++) {
        next = line->next;
        free(line);
    }
    assert_int_equal(taken, TMS_LOG_QUEUE_LINES);
    write_line("there is room again");
    assert_string_equal(take(), "2:there is room again");
    tms_log_queue_close(&queue);
}

static void what_is_left_at_exit_goes_to_stderr(void **state) {
    (void)state;
    tms_log_queue_open(&queue);
    write_line("first");
    write_line("second");
    captured_stderr_t captured = capture_begin();
    tms_log_at_exit(&log_under_test);
    capture_end(captured, output, sizeof output);
    assert_int_equal(count_lines(output), 2);
    assert_true(strstr(output, "warning: first\n") < strstr(output, "warning: second\n"));
    assert_string_equal(take(), "");
}

/* A child that was forked during a call of its parent: the parent's lines are the parent's, its own go to stderr at once. */
static void a_forked_child_keeps_nothing(void **state) {
    (void)state;
    tms_log_queue_open(&queue);
    write_line("the parent's");
    tms_log_after_fork_in_child(&log_under_test);
    captured_stderr_t captured = capture_begin();
    write_line("the child's");
    tms_log_queue_close(&queue); /* the end of the call, in the child */
    tms_log_at_exit(&log_under_test);
    capture_end(captured, output, sizeof output);
    assert_int_equal(count_lines(output), 1);
    assert_non_null(strstr(output, "warning: the child's\n"));
    tms_log_queue_open(&queue);
    write_line("in a call of the child");
    tms_log_queue_close(&queue);
    assert_string_equal(take(), "2:in a call of the child");
}

enum { THREADS = 8, LINES = 30 };

static void *write_lines(void *argument) {
    (void)argument;
    for (int i = 0; i < LINES; i++) {
        tms_log_queue_open(&queue);
        write_line("x");
        tms_log_queue_close(&queue);
    }
    return NULL;
}

static void threads_lose_no_line(void **state) {
    (void)state;
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, write_lines, NULL), 0);
    int taken = 0;
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        for (const char *found = take(); *found; found++) taken += *found == 'x';
    }
    assert_int_equal(taken, THREADS * LINES);
    assert_int_equal(atomic_load(&queue.lines), 0);
}

#define TEST(test) cmocka_unit_test_setup(test, begin)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(lines_wait_only_while_a_call_is_under_way),
        TEST(a_full_queue_overflows_to_stderr),
        TEST(what_is_left_at_exit_goes_to_stderr),
        TEST(a_forked_child_keeps_nothing),
        TEST(threads_lose_no_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
