/* Guards what becomes of shared backups when their process forks, executes another program, exits, is killed or is stopped
 * at any time, when processes pause beside each other, when the folder is full, and when two containers mount it. */
#include "support/shared_replica.h"

#include <sys/mount.h>

/* ---- forks ---- */

static pid_t fork_replica(const replica_t *replica) {
    int child = 0;
    tell(replica, "fork 1");
    assert_int_equal(sscanf(hear(replica), "ok %d", &child), 1);
    return child;
}

static void kill_stranger(pid_t process) { assert_int_equal(kill(process, SIGKILL), 0); }

static void a_forked_child_ends(void **state) {
    (void)state;
    const replica_t replica = start();
    ask(&replica, "allocate 1");
    ask(&replica, "pause");
    ask(&replica, "fork 0");
    assert_folder(1, 1, 1);
    ask(&replica, "resume");
    ask(&replica, "fork 0");
    pause_replica(&replica, TAIL_BYTES, OBJECT_BYTES);
    assert_ends_well(&replica);
    assert_folder(0, 0, 0);
}

/* Another process pauses the same contents, and cleans up. */
static void assert_only_another(uint64_t copied, uint64_t unchanged) {
    const replica_t other = start();
    ask(&other, "allocate 1");
    pause_replica(&other, copied, unchanged);
    assert_folder(1, 1, 1);
    ask(&other, "resume");
    assert_ends_well(&other);
    assert_folder(0, 0, 0);
}

static void a_process_is_killed_while_its_child_lives(void **state) {
    (void)state;
    const replica_t replica = start();
    ask(&replica, "allocate 1");
    ask(&replica, "pause");
    ask(&replica, "await_registrar");
    const pid_t child = fork_replica(&replica);
    kill_replica(&replica);
    assert_only_another(CONTENT_BYTES, 0);
    kill_stranger(child);
}

static void a_writer_is_killed_while_its_child_lives(void **state) {
    (void)state;
    const replica_t replica = start();
    ask(&replica, "allocate 1");
    ask(&replica, "pause_held 1");
    const pid_t child = fork_replica(&replica);
    kill_replica(&replica);
    assert_only_another(CONTENT_BYTES, 0);
    kill_stranger(child);
}

static void another_program_is_executed(void **state) {
    (void)state;
    const replica_t replica = start();
    ask(&replica, "allocate 1");
    ask(&replica, "pause");
    ask(&replica, "await_registrar");
    tell(&replica, "execute");
    tell(&replica, "hello");
    assert_string_equal(hear(&replica), "hello");
    assert_only_another(CONTENT_BYTES, 0);
    assert_ends_well(&replica);
}

/* ---- exits ---- */

static void an_exit_while_memory_is_paused(void **state) {
    (void)state;
    const replica_t replica = start();
    ask(&replica, "allocate 1");
    ask(&replica, "pause");
    assert_folder(1, 1, 1);
    assert_ends_well(&replica);
    assert_folder(0, 0, 0);
}

static void an_exit_during_a_registration(void **state) {
    (void)state;
    const replica_t replica = start();
    ask(&replica, "allocate 1");
    ask(&replica, "pause");
    ask(&replica, "resume");
    ask(&replica, "await_registrar");
    ask(&replica, "hold_registrations");
    pause_replica(&replica, TAIL_BYTES, OBJECT_BYTES);
    assert_ends_well(&replica);
    assert_folder(0, 0, 0);
}

static void an_exit_while_another_thread_copies(void **state) {
    (void)state;
    const replica_t replica = start();
    ask(&replica, "allocate 1");
    ask(&replica, "allocate 2");
    ask(&replica, "pause_held 1");
    tell(&replica, "exit");
    assert_ends_well(&replica);
    assert_folder(0, 0, 0);
}

/* The pause goes on after the exit handlers, and before the process ends. */
static void an_exit_before_another_thread_goes_on(const char *point) {
    const replica_t replica = start();
    ask(&replica, "allocate 1");
    ask(&replica, "allocate 2");
    ask(&replica, point);
    tell(&replica, "exit");
    assert_ends_well(&replica);
    assert_folder(0, 0, 0);
}

static void an_exit_before_another_thread_has_copied(void **state) {
    (void)state;
    an_exit_before_another_thread_goes_on("pause_held 1 1");
}

static void an_exit_before_another_thread_plans(void **state) {
    (void)state;
    an_exit_before_another_thread_goes_on("pause_held 0 1");
}

/* ---- several processes ---- */

static void a_writer_is_stopped(void **state) {
    (void)state;
    const replica_t writer = start(), other = start();
    ask(&writer, "allocate 1");
    ask(&writer, "pause_held 1");
    assert_int_equal(kill(writer.pid, SIGSTOP), 0);
    ask(&other, "allocate 1");
    pause_replica(&other, CONTENT_BYTES, 0); /* a private copy */
    assert_int_equal(for_each("objects", NULL), 1);
    ask(&other, "resume");
    kill_replica(&writer);
    pause_replica(&other, CONTENT_BYTES, 0);
    assert_folder(1, 1, 1);
    ask(&other, "resume");
    pause_replica(&other, TAIL_BYTES, OBJECT_BYTES);
    assert_ends_well(&other);
    assert_folder(0, 0, 0);
}

static void processes_that_pause_beside_starts_and_exits(void **state) {
    (void)state;
    replica_t loops[2];
    for (size_t i = 0; i < 2; i++) {
        loops[i] = start();
        for (size_t j = 0; j < 3; j++) ask(&loops[i], "allocate 100");
        tell(&loops[i], "loop 30");
    }
    for (size_t i = 0; i < 6; i++) {
        const replica_t other = start();
        ask(&other, "allocate 100");
        ask(&other, "allocate 102");
        ask(&other, "pause");
        if (i % 2) ask(&other, "resume");
        if (i % 3)
            assert_ends_well(&other);
        else
            kill_replica(&other);
    }
    for (size_t i = 0; i < 2; i++) assert_ok_answer(&loops[i], "loop");
    ask(&loops[0], "pause"); /* cleans up */
    assert_ends_well(&loops[0]);
    assert_ends_well(&loops[1]);
    assert_folder(0, 0, 0);
}

static void two_devices_have_one_object(void **state) {
    (void)state;
    const replica_t replica = start();
    ask(&replica, "allocate 1 0");
    ask(&replica, "allocate 1 1");
    pause_replica(&replica, OBJECT_BYTES + 2 * TAIL_BYTES, OBJECT_BYTES);
    assert_folder(1, 1, 1);
    ask(&replica, "resume");
    assert_ends_well(&replica);
    assert_folder(0, 0, 0);
}

/* ---- a full folder: in a mount namespace of its own ---- */

/* Pauses TENSORS contents, some of which are there already, in a folder that has no room for all, and again with room. */
static void pause_in_full_folder(const char *little, const char *much) {
    enter_mount_namespace();
    assert_int_equal(make(NULL), 0);
    mount_memory(base, little);
    const replica_t replica = start();
    for (int i = 0; i < TENSORS; i++) {
        char command[LINE_BYTES];
        snprintf(command, sizeof command, "allocate %d", i);
        ask(&replica, command);
        if (i == 1) ask(&replica, "pause");
        if (i == 1) ask(&replica, "resume");
    }
    tell(&replica, "pause"); /* and asserts that everything is active */
    const char *answer = hear(&replica);
    assert_ptr_equal(strstr(answer, "BACKUP_IO"), answer);
    assert_non_null(strstr(answer, root));
    assert_non_null(strstr(answer, "TMS_SHARED_DIR"));
    assert_non_null(strstr(answer, "--shm-size"));
    assert_folder(1, 2, 2);
    assert_int_equal(mount(NULL, base, NULL, MS_REMOUNT, much), 0);
    pause_replica(&replica, (TENSORS - 2) * (uint64_t)OBJECT_BYTES + TENSORS * TAIL_BYTES, 2 * (uint64_t)OBJECT_BYTES);
    assert_folder(1, TENSORS, TENSORS);
    ask(&replica, "resume");
    assert_ends_well(&replica);
    assert_folder(0, 0, 0);
    assert_int_equal(umount(base), 0);
    assert_int_equal(release(NULL), 0);
}

static int role_full_in_bytes(void) {
    pause_in_full_folder("size=4m,mode=0700", "size=8m");
    return 0;
}

static int role_full_in_files(void) {
    pause_in_full_folder("nr_inodes=20,mode=0700", "nr_inodes=100");
    return 0;
}

/* Two containers mount one folder, each at a path of its own, in a mount namespace of its own. */
static int role_containers(void) {
    char other[TEMPORARY_BYTES], folder[TEMPORARY_BYTES];
    enter_mount_namespace();
    assert_int_equal(make(NULL), 0);
    snprintf(other, sizeof other, "%.200s-other", base);
    snprintf(folder, sizeof folder, "%.200s/store", other);
    const replica_t one = start();
    assert_int_equal(mkdir(other, 0700), 0);
    enter_mount_namespace();
    assert_int_equal(mount(base, other, NULL, MS_BIND, NULL), 0);
    assert_int_equal(setenv("TMS_SHARED_DIR", folder, 1), 0);
    const replica_t two = start();
    ask(&one, "allocate 1");
    ask(&two, "allocate 1");
    ask(&two, "allocate 2");
    pause_replica(&one, CONTENT_BYTES, 0);
    pause_replica(&two, CONTENT_BYTES + TAIL_BYTES, OBJECT_BYTES);
    assert_folder(2, 2, 3);
    kill_replica(&two);
    ask(&one, "resume");
    pause_replica(&one, TAIL_BYTES, OBJECT_BYTES); /* and cleans up */
    assert_folder(1, 1, 1);
    ask(&one, "resume");
    assert_ends_well(&one);
    assert_folder(0, 0, 0);
    assert_int_equal(umount(other), 0);
    assert_int_equal(rmdir(other), 0);
    assert_int_equal(release(NULL), 0);
    return 0;
}

static void assert_role(const char *role) {
    int status;
    fflush(NULL);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        execute_again(role);
        _exit(127);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == SKIPPED) skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void a_folder_that_is_full_in_bytes(void **state) {
    (void)state;
    assert_role("full in bytes");
}

static void a_folder_that_is_full_in_files(void **state) {
    (void)state;
    assert_role("full in files");
}

static void two_containers_with_one_folder(void **state) {
    (void)state;
    assert_role("containers");
}

int main(int argc, char **argv) {
    REPLICA_MAIN(argc, argv)
    if (argc > 1 && strcmp(argv[1], "full in bytes") == 0) return role_full_in_bytes();
    if (argc > 1 && strcmp(argv[1], "full in files") == 0) return role_full_in_files();
    if (argc > 1) return role_containers();
#define PROCESS_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        PROCESS_TEST(a_forked_child_ends),
        PROCESS_TEST(a_process_is_killed_while_its_child_lives),
        PROCESS_TEST(a_writer_is_killed_while_its_child_lives),
        PROCESS_TEST(another_program_is_executed),
        PROCESS_TEST(an_exit_while_memory_is_paused),
        PROCESS_TEST(an_exit_during_a_registration),
        PROCESS_TEST(an_exit_while_another_thread_copies),
        PROCESS_TEST(an_exit_before_another_thread_has_copied),
        PROCESS_TEST(an_exit_before_another_thread_plans),
        PROCESS_TEST(a_writer_is_stopped),
        PROCESS_TEST(processes_that_pause_beside_starts_and_exits),
        PROCESS_TEST(two_devices_have_one_object),
        PROCESS_TEST(a_folder_that_is_full_in_bytes),
        PROCESS_TEST(a_folder_that_is_full_in_files),
        PROCESS_TEST(two_containers_with_one_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
