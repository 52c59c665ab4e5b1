/* Guards log.c: levels, the format of a line, and that logging does not disturb the program. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "base/log.h"
#include "captured_stderr.h"
#include "own_process.h"

static char output[1 << 16];

static size_t most_written; /* a write to stderr takes so many bytes at most; 0: all of them */

ssize_t write(int fd, const void *data, size_t bytes) {
    ssize_t (*real)(int, const void *, size_t) =
        (ssize_t (*)(int, const void *, size_t))(uintptr_t)dlsym(RTLD_NEXT, "write");
    if (fd == STDERR_FILENO && most_written > 0 && bytes > most_written) bytes = most_written;
    return real(fd, data, bytes);
}

static void test_levels(void **state) {
    (void)state;
    static const char *const names[] = {NULL, "error", "warning", "info", "debug"};
    for (int level = TMS_LOG_SILENT; level <= TMS_LOG_DEBUG; level++) {
        tms_log_t log;
        tms_log_init(&log, (tms_log_level_t)level);
        assert_false(tms_log_enabled(&log, TMS_LOG_SILENT));
        for (int message = TMS_LOG_ERROR; message <= TMS_LOG_DEBUG; message++) {
            char expected[128] = "";
            if (message <= level) {
                snprintf(expected, sizeof(expected), "torch_memory_saver[%ld] %s: number 7\n", (long)getpid(),
                         names[message]);
            }
            captured_stderr_t captured = capture_begin();
            tms_log_write(&log, (tms_log_level_t)message, "number %d", 7);
            capture_end(captured, output, sizeof(output));
            assert_string_equal(output, expected);
            assert_int_equal(tms_log_enabled(&log, (tms_log_level_t)message), message <= level);
        }
    }
}

static void test_a_message_is_one_line(void **state) {
    (void)state;
    tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    tms_log_write(&log, TMS_LOG_WARNING, "tag '%s'", "a\nb\r\n");
    size_t length = capture_end(captured, output, sizeof(output));
    assert_int_equal(count_lines(output), 1);
    assert_int_equal(output[length - 1], '\n');
    assert_non_null(strstr(output, "tag 'a b  '\n"));
}

static void test_long_messages_are_cut(void **state) {
    (void)state;
    tms_log_t log;
    char *text = calloc(1, 10000);
    assert_non_null(text);
    memset(text, 'x', 9999);
    tms_log_init(&log, TMS_LOG_ERROR);
    captured_stderr_t captured = capture_begin();
    tms_log_write(&log, TMS_LOG_ERROR, "%s", text);
    size_t length = capture_end(captured, output, sizeof(output));
    free(text);
    assert_int_equal(length, 2047);
    assert_int_equal(count_lines(output), 1);
    assert_int_equal(output[length - 1], '\n');
    assert_int_equal(output[length - 2], 'x');
}

static void test_errno_is_kept(void **state) {
    (void)state;
    tms_log_t log;
    tms_log_init(&log, TMS_LOG_ERROR);
    int saved = dup(STDERR_FILENO);
    close(STDERR_FILENO);
    errno = EXDEV;
    tms_log_write(&log, TMS_LOG_ERROR, "this has no reader");
    int after = errno;
    dup2(saved, STDERR_FILENO);
    close(saved);
    assert_int_equal(after, EXDEV);
}

/* A program whose stderr is a pipe without a reader must survive a warning, and still get its own SIGPIPE later. */
static void test_a_broken_pipe_is_survived(void **state) {
    (void)state;
    int report[2];
    char survived = 0;
    assert_int_equal(pipe(report), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int ends[2];
        sigset_t pending, mask;
        tms_log_t log;
        tms_log_init(&log, TMS_LOG_ERROR);
        signal(SIGPIPE, SIG_DFL);
        if (pipe(ends) != 0) _exit(2);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        tms_log_write(&log, TMS_LOG_ERROR, "this has no reader");
        sigpending(&pending);
        pthread_sigmask(SIG_SETMASK, NULL, &mask);
        if (sigismember(&pending, SIGPIPE) || sigismember(&mask, SIGPIPE)) _exit(3);
        if (write(report[1], "s", 1) != 1) _exit(4);
        ssize_t written = write(ends[1], "x", 1);
        _exit(written == 1 ? 5 : 6);
    }
    int status = 0;
    close(report[1]);
    ssize_t got = read(report[0], &survived, 1);
    close(report[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(got, 1);
    assert_int_equal(survived, 's');
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGPIPE);
}

/* The state of SIGPIPE before the write. */
typedef enum pipe_signal { UNBLOCKED, BLOCKED, BLOCKED_AND_PENDING } pipe_signal_t;

/* Runs in a child: the line's reader has gone */
static void write_to_broken_pipe(pipe_signal_t before) {
    const bool blocked = before != UNBLOCKED, pending = before == BLOCKED_AND_PENDING;
    int ends[2];
    sigset_t pipe_signal, seen;
    tms_log_t log;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    if (blocked) pthread_sigmask(SIG_BLOCK, &pipe_signal, NULL);
    if (pending) raise(SIGPIPE);
    tms_log_init(&log, TMS_LOG_ERROR);
    if (pipe(ends) != 0 || dup2(ends[1], STDERR_FILENO) < 0) exit(2);
    close(ends[0]);
    tms_log_write(&log, TMS_LOG_ERROR, "this has no reader");
    sigpending(&seen);
    if (sigismember(&seen, SIGPIPE) != pending) exit(3);
    pthread_sigmask(SIG_SETMASK, NULL, &seen);
    if (sigismember(&seen, SIGPIPE) != blocked) exit(4);
}

static void write_with_the_signal_unblocked(void) { write_to_broken_pipe(UNBLOCKED); }
static void write_with_the_signal_blocked(void) { write_to_broken_pipe(BLOCKED); }
static void write_with_the_signal_pending(void) { write_to_broken_pipe(BLOCKED_AND_PENDING); }

/* A signal of the program's own stays pending, and one that the write caused does not. */
static void test_the_programs_own_signals_are_kept(void **state) {
    (void)state;
    assert_exits(write_with_the_signal_unblocked);
    assert_exits(write_with_the_signal_blocked);
    assert_exits(write_with_the_signal_pending);
}

static void test_an_empty_message_is_a_line(void **state) {
    char expected[64];
    tms_log_t log;
    (void)state;
    tms_log_init(&log, TMS_LOG_ERROR);
    captured_stderr_t captured = capture_begin();
    tms_log_write(&log, TMS_LOG_ERROR, "%s", "");
    capture_end(captured, output, sizeof(output));
    snprintf(expected, sizeof(expected), "torch_memory_saver[%ld] error: \n", (long)getpid());
    assert_string_equal(output, expected);
}

static void test_a_partial_write_is_continued(void **state) {
    char expected[64];
    tms_log_t log;
    (void)state;
    tms_log_init(&log, TMS_LOG_ERROR);
    captured_stderr_t captured = capture_begin();
    most_written = 7;
    tms_log_write(&log, TMS_LOG_ERROR, "all of it");
    most_written = 0;
    capture_end(captured, output, sizeof(output));
    snprintf(expected, sizeof(expected), "torch_memory_saver[%ld] error: all of it\n", (long)getpid());
    assert_string_equal(output, expected);
}

static void test_once(void **state) {
    (void)state;
    tms_log_t log;
    _Atomic bool logged = false;
    tms_log_init(&log, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < 3; i++) tms_log_once(&log, &logged, TMS_LOG_WARNING, "time %d", i);
    capture_end(captured, output, sizeof(output));
    assert_int_equal(count_lines(output), 1);
    assert_non_null(strstr(output, "time 0\n"));
}

enum { THREADS = 4, LINES = 100 };

static void *write_lines(void *argument) {
    for (int i = 0; i < LINES; i++) tms_log_write(argument, TMS_LOG_ERROR, "abcdefghijklmnopqrstuvwxyz");
    return NULL;
}

static void test_threads_do_not_mix_lines(void **state) {
    (void)state;
    tms_log_t log;
    char line[128];
    pthread_t threads[THREADS];
    tms_log_init(&log, TMS_LOG_ERROR);
    snprintf(line, sizeof(line), "torch_memory_saver[%ld] error: abcdefghijklmnopqrstuvwxyz\n", (long)getpid());
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, write_lines, &log);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    size_t length = capture_end(captured, output, sizeof(output));
    assert_int_equal(length, (size_t)THREADS * LINES * strlen(line));
    for (size_t at = 0; at < length; at += strlen(line)) assert_memory_equal(output + at, line, strlen(line));
}

static tms_error_t error_on(int device, int result, uint64_t bytes) {
    tms_error_t error = {
        .status = TMS_DRIVER, .call = "cuMemRelease", .driver_result = result, .device = device, .bytes = bytes};
    snprintf(error.message, sizeof error.message, "free: failed with %d on %d.", result, device);
    return error;
}

static void recur(tms_log_t *log, int device, int result, uint64_t bytes) {
    tms_error_t error = error_on(device, result, bytes);
    tms_log_recurring(log, TMS_LOG_QUARANTINED, TMS_LOG_WARNING, &error, "It is kept.");
}

/* A summary is written when it is due, and the last one in any case. */
typedef enum summary { WHEN_DUE = false, LAST = true } summary_t;

static unsigned summarize(tms_log_t *log, summary_t summary) {
    captured_stderr_t captured = capture_begin();
    tms_log_summarize(log, summary);
    capture_end(captured, output, sizeof(output));
    return count_lines(output);
}

static void test_a_cause_is_logged_once_and_then_counted(void **state) {
    (void)state;
    static tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < 5; i++) recur(&log, 1, 700, 1024);
    capture_end(captured, output, sizeof(output));
    assert_int_equal(count_lines(output), 1);
    assert_non_null(strstr(output, "warning: free: failed with 700 on 1. It is kept.\n"));
    assert_int_equal(summarize(&log, WHEN_DUE), 1);
    assert_non_null(strstr(output, "device 1: memory or addresses could not be released yet: 4 more times since that was "
                                   "logged, 4.0 KiB in total\n"));
    assert_int_equal(summarize(&log, WHEN_DUE), 0);
    assert_int_equal(summarize(&log, LAST), 0);
}

static void test_causes_are_distinguished(void **state) {
    (void)state;
    static tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    tms_error_t error = error_on(-1, 700, 1);
    for (int i = 0; i < 2; i++) {
        recur(&log, 0, 700, 1);
        recur(&log, 63, 700, 1);
        recur(&log, -1, 700, 1);
        tms_log_recurring(&log, TMS_LOG_DAMAGED, TMS_LOG_ERROR, &error, "");
    }
    recur(&log, 0, 999, 1);
    capture_end(captured, output, sizeof(output));
    assert_int_equal(count_lines(output), 5);
    assert_non_null(strstr(output, "failed with 999 on 0."));
    assert_int_equal(summarize(&log, LAST), 4);
    assert_non_null(strstr(output, "warning: memory or addresses could not be released yet: 1 more time since"));
    assert_non_null(strstr(output, "device 0: memory or addresses could not be released yet: 1 more time since"));
}

/* Two objects that fail differently, in turn. */
static void test_errors_that_alternate_do_not_flood(void **state) {
    (void)state;
    static tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < 100; i++) recur(&log, 0, i % 2 ? 700 : 999, 1);
    capture_end(captured, output, sizeof(output));
    assert_int_equal(count_lines(output), 2);
    assert_int_equal(summarize(&log, LAST), 1);
    assert_non_null(strstr(output, ": 98 more times since"));
}

static void test_summaries_become_rarer(void **state) {
    (void)state;
    enum { CALLS = 1000, MAX = 10 }; /* 2 to the tenth is more */
    static tms_log_t log;
    unsigned lines = 0;
    tms_log_init(&log, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    recur(&log, 0, 700, 1);
    capture_end(captured, output, sizeof(output));
    for (int i = 0; i < CALLS; i++) {
        recur(&log, 0, 700, 1);
        lines += summarize(&log, WHEN_DUE);
    }
    assert_int_equal(lines, MAX);
    assert_int_equal(summarize(&log, LAST), 1); /* the rest, at the end */
    assert_non_null(strstr(output, ": 1000 more times since"));
}

static void test_nothing_is_omitted_at_level_debug(void **state) {
    (void)state;
    static tms_log_t log;
    tms_log_init(&log, TMS_LOG_DEBUG);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < 5; i++) recur(&log, 1, 700, 1024);
    capture_end(captured, output, sizeof(output));
    assert_int_equal(count_lines(output), 5);
    assert_int_equal(summarize(&log, LAST), 0);
}

static void test_a_child_reports_nothing_of_its_parent(void **state) {
    (void)state;
    static tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < 3; i++) recur(&log, 0, 700, 1);
    capture_end(captured, output, sizeof(output));
    tms_log_after_fork_in_child(&log);
    assert_int_equal(summarize(&log, LAST), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_a_message_is_one_line),
        cmocka_unit_test(test_long_messages_are_cut),
        cmocka_unit_test(test_errno_is_kept),
        cmocka_unit_test(test_a_broken_pipe_is_survived),
        cmocka_unit_test(test_the_programs_own_signals_are_kept),
        cmocka_unit_test(test_an_empty_message_is_a_line),
        cmocka_unit_test(test_a_partial_write_is_continued),
        cmocka_unit_test(test_once),
        cmocka_unit_test(test_threads_do_not_mix_lines),
        cmocka_unit_test(test_a_cause_is_logged_once_and_then_counted),
        cmocka_unit_test(test_causes_are_distinguished),
        cmocka_unit_test(test_errors_that_alternate_do_not_flood),
        cmocka_unit_test(test_summaries_become_rarer),
        cmocka_unit_test(test_nothing_is_omitted_at_level_debug),
        cmocka_unit_test(test_a_child_reports_nothing_of_its_parent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
