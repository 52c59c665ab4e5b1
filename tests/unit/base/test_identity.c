/* Guards identity.c: that it says of this process what the system says of it. */
#include "base/identity.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "own_process.h"

static void the_boot_and_the_namespace(void **state) {
    (void)state;
    char boot_id[TMS_BOOT_ID_BYTES], text[64], target[64];
    dev_t device = 0;
    ino_t inode = 0;
    assert_true(tms_identity_boot_id(boot_id));
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    assert_non_null(file);
    assert_non_null(fgets(text, sizeof text, file));
    fclose(file);
    assert_memory_equal(boot_id, text, sizeof boot_id);
    assert_true(tms_identity_namespace(&device, &inode));
    ssize_t length = readlink("/proc/self/ns/pid", target, sizeof target - 1);
    assert_true(length > 0);
    target[length] = '\0';
    snprintf(text, sizeof text, "pid:[%lu]", (unsigned long)inode);
    assert_string_equal(target, text);
}

/* In a child with brackets and spaces in its name. The number is compared with the parent's, which was started before. */
static uint64_t parents_start;

static void look_at_the_start(void) {
    prctl(PR_SET_NAME, "a) b (c) 5");
    uint64_t own = tms_identity_started();
    end_child(own >= parents_start && own < parents_start + 1000000 ? 0 : 1);
}

static void the_start_time(void **state) {
    (void)state;
    parents_start = tms_identity_started();
    assert_true(parents_start > 0);
    assert_int_equal(parents_start, tms_identity_started());
    int status = run_in_child(look_at_the_start);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void a_missing_file(void **state) {
    (void)state;
    char text[8];
    assert_int_equal(tms_identity_read("/proc/no/such/file", text, sizeof text), -1);
    assert_int_equal(tms_identity_read("/proc/self/stat", text, sizeof text), sizeof text);
}

static void the_state_of_a_process(void **state) {
    (void)state;
    assert_int_equal(tms_identity_state(getpid()), 'R');
    pid_t child = fork();
    if (child == 0) {
        for (;;) pause();
    }
    assert_int_equal(kill(child, SIGSTOP), 0);
    assert_int_equal(waitpid(child, NULL, WUNTRACED), child);
    assert_int_equal(tms_identity_state(child), 'T');
    assert_int_equal(kill(child, SIGKILL), 0);
    siginfo_t ended;
    assert_int_equal(waitid(P_PID, (id_t)child, &ended, WEXITED | WNOWAIT), 0);
    assert_int_equal(tms_identity_state(child), 'Z');
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(tms_identity_state(child), 0);
    assert_int_equal(errno, ENOENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_boot_and_the_namespace),
        cmocka_unit_test(the_start_time),
        cmocka_unit_test(a_missing_file),
        cmocka_unit_test(the_state_of_a_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
