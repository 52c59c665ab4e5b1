/* Guards the files of the device locks: hostile, removed and replaced ones, their record of the holder, and their names. */
#include "support/device_lock_fixture.h"

#include <sys/prctl.h>

static int questions;

/* ---- bodies ---- */

static void refuse(const char *directory, int os_error, const char *part) {
    char named[2 * PATH_BYTES];
    snprintf(named, sizeof(named), "'%s", directory);
    if (named[strlen(named) - 1] == '/') named[strlen(named) - 1] = '\0';
    /* The state, and with it the configuration, is made once in a process. */
    locks()->directory = directory;
    int before = open_descriptors();
    CHECK(acquire(3) == TMS_INVALID_STATE);
    CHECK(error.os_error == os_error);
    CHECK(strstr(error.message, named) && strstr(error.message, part) && strstr(error.message, "TMS_LOCK_DIR"));
    CHECK(open_descriptors() == before);
    CHECK(locks()->device[0].count == 0 && locks()->device[1].count == 0);
}

static void refuse_hostile_directories(void) {
    CHECK(acquire(1) == TMS_OK); /* loads the driver, whose descriptors do not count */
    tms_device_locks_release(locks(), 1);
    CHECK(mkdir(below("real"), 0700) == 0 && symlink(below("real"), below("link")) == 0);
    refuse(below("link"), ENOTDIR, "openat");
    refuse(below("link/"), ENOTDIR, "openat");
    CHECK(rmdir(below("real")) == 0);         /* empty: the link was not followed */
    refuse(below("link"), ENOTDIR, "openat"); /* a link to nowhere */
    CHECK(fclose(fopen(below("file"), "w")) == 0);
    refuse(below("file"), ENOTDIR, "openat");
    refuse(below("missing/below"), ENOENT, "mkdirat");
    refuse("relative", EINVAL, "Set TMS_LOCK_DIR to an absolute path");
    char *endless = malloc(PATH_MAX + 2);
    CHECK(endless);
    memset(endless, '/', PATH_MAX + 1);
    endless[PATH_MAX + 1] = '\0';
    locks()->directory = endless;
    CHECK(acquire(1) == TMS_INVALID_STATE && error.os_error == ENAMETOOLONG);
    free(endless);
    locks()->directory = base;
    CHECK(acquire(3) == TMS_OK); /* and the next call succeeds */
}

static void refuse_foreign_owners(void) {
    if (geteuid() != 0) exit(SKIPPED); /* only root can make files of another user */
    CHECK(acquire(1) == TMS_OK);
    tms_device_locks_release(locks(), 1);
    CHECK(mkdir(below("foreign"), 0777) == 0 && chown(below("foreign"), SOMEBODY_ELSE, SOMEBODY_ELSE) == 0);
    refuse(below("foreign"), EPERM, "this user's");
    CHECK(fclose(fopen(file_of(1), "w")) == 0 && chown(file_of(1), SOMEBODY_ELSE, SOMEBODY_ELSE) == 0);
    refuse(base, EPERM, "regular file of this user's");
    CHECK(!is_locked(0));
}

static void refuse_hostile_files(void) {
    CHECK(acquire(1) == TMS_OK);
    tms_device_locks_release(locks(), 1);
    CHECK(fclose(fopen(below("victim"), "w")) == 0 && symlink(below("victim"), file_of(1)) == 0);
    refuse(base, ELOOP, "openat");
    CHECK(unlink(file_of(1)) == 0 && mkfifo(file_of(1), 0600) == 0);
    refuse(base, EPERM, "regular");
    CHECK(unlink(file_of(1)) == 0 && mkdir(file_of(1), 0700) == 0);
    refuse(base, EISDIR, "openat");
    CHECK(rmdir(file_of(1)) == 0);
    CHECK(acquire(3) == TMS_OK);
}

static void survive_failing_calls(void) {
    CHECK(acquire(1) == TMS_OK);
    tms_device_locks_release(locks(), 1);
    fault.flock_error = ENOLCK;
    fault.flock_failures = 1;
    refuse(base, ENOLCK, "flock");
    fault.flock_error = EINTR;
    fault.flock_failures = 3;
    CHECK(acquire(3) == TMS_OK);
    tms_device_locks_release(locks(), 3);
    fault.remove_first = true; /* a lock on a file without a name would exclude no process */
    CHECK(acquire(1) == TMS_OK && is_locked(0));
    tms_device_locks_release(locks(), 1);
    /* A process that cannot check whether its lock file still exists does not rely on it. */
    CHECK(acquire(1) == TMS_OK);
    locks()->directory = "/nowhere/at/all";
    CHECK(acquire(1) == TMS_INVALID_STATE && strstr(error.message, "mkdirat"));
    locks()->directory = base;
    CHECK(locks()->device[0].count == 1 && is_locked(0));
}

/* ---- files that are removed ---- */

static void notice_a_removed_file(void) {
    CHECK(acquire(1) == TMS_OK);
    CHECK(unlink(file_of(0)) == 0 && !is_locked(0));
    CHECK(acquire(1) == TMS_OK);
    CHECK(is_locked(0)); /* the new one */
    tms_device_locks_release(locks(), 1);
    CHECK(is_locked(0));
    tms_device_locks_release(locks(), 1);
    CHECK(!is_locked(0));
}

static void notice_a_replaced_directory(void) {
    locks()->directory = below("made");
    CHECK(acquire(3) == TMS_OK);
    CHECK(rename(below("made"), below("moved")) == 0 && mkdir(below("made"), 0700) == 0);
    int before = open_descriptors();
    CHECK(acquire(3) == TMS_OK);
    CHECK(open_descriptors() == before);
    locks()->directory = base;
    CHECK(rename(below("made"), below("again")) == 0);
    strcat(base, "/again"); /* where is_locked looks */
    CHECK(is_locked(0) && is_locked(1));
    *strrchr(base, '/') = '\0';
}

/* Another process that has locked the file made in place of the removed one. */
static void fail_where_another_process_has_replaced_the_file(void) {
    int ready[2], go[2];
    char byte = 0;
    CHECK(pipe(ready) == 0 && pipe(go) == 0);
    pid_t owner = fork();
    CHECK(owner >= 0);
    if (owner == 0) {
        CHECK(acquire(1) == TMS_OK && unlink(file_of(0)) == 0);
        CHECK(write(ready[1], "r", 1) == 1 && read(go[0], &byte, 1) == 1);
        CHECK(acquire(1) == TMS_DEVICE_LOCKED && strstr(error.message, "replaced"));
        CHECK(locks()->device[0].count == 1); /* what it had before */
        CHECK(acquire(2) == TMS_OK);          /* the other device is not affected */
        _exit(0);
    }
    int status = -1;
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK(acquire(1) == TMS_OK);
    CHECK(write(go[1], "g", 1) == 1);
    CHECK(waitpid(owner, &status, 0) == owner && status == 0);
}

static void say_at_the_end_that_the_file_was_removed(void) {
    char text[1024];
    CHECK(acquire(3) == TMS_OK && unlink(file_of(1)) == 0);
    captured_stderr_t captured = capture_begin();
    tms_device_locks_release(locks(), 3);
    capture_end(captured, text, sizeof text);
    CHECK(strstr(text, "the lock file of device 1 was removed") && !strstr(text, "device 0"));
}

static int32_t replace_the_directory(void *argument) {
    const pid_t *process = argument;
    questions++;
    if (access(below("moved"), F_OK) == 0) return 0;
    CHECK(kill(*process, 0) == 0); /* still holds the lock, whose file has moved */
    return rename(below("made"), below("moved")) == 0 ? 0 : 1;
}

static void wait_for_the_file_of_the_present_directory(void) {
    tms_wait_t wait;
    setenv("TMS_LOCK_DIR", below("made"), 1);
    holder_t holder = start_holder(1);
    tms_wait_begin(&wait, replace_the_directory, &holder.process, INFINITY);
    CHECK(tms_device_locks_acquire(locks(), 1, &wait, &context, &error) == TMS_OK);
    CHECK(questions > 0 && access(below("made"), F_OK) == 0);
    end_holder(&holder);
}

/* ---- the holder in a file ---- */

/* By the clock that the holder uses: time() may still be in the second before. */
static time_t seconds_now(void) {
    struct timespec now;
    CHECK(clock_gettime(CLOCK_REALTIME, &now) == 0);
    return now.tv_sec;
}

static void name_the_holder(void) {
    char part[96];
    CHECK(prctl(PR_SET_NAME, "py\033[2J\xC3thon") == 0); /* which the holder inherits */
    time_t before = seconds_now();
    holder_t holder = start_holder(1);
    time_t after = seconds_now();
    CHECK(acquire(1) == TMS_DEVICE_LOCKED);
    CHECK(strstr(error.message, "served first: device 0; waited 0.") && !strstr(error.message, "of a device"));
    CHECK(strstr(error.message, "Wait longer with timeout=, or let the other process pause"));
    snprintf(part, sizeof part, "Process %ld (py?[2J?thon) has held it since 2", (long)holder.process);
    const char *since = strstr(error.message, part);
    struct tm utc = {0};
    CHECK(since && strptime(since + strlen(part) - 1, "%Y-%m-%dT%H:%M:%SZ", &utc));
    CHECK(before <= timegm(&utc) && timegm(&utc) <= after);
    end_holder(&holder);
    struct stat found;
    CHECK(stat(file_of(0), &found) == 0 && found.st_size == 0); /* no name stays behind */
}

static void not_believe_what_is_no_name(void) {
    static const char *const texts[] = {"",
                                        "\n",
                                        "0 0\n",
                                        "-1 5\n",
                                        "12 34",
                                        "12 34 evil\033[2J\n",
                                        "99999999999999999999999999999999999999999999999999999999999999999999 1\n"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        int fd = open(file_of(0), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        CHECK(fd >= 0 && write(fd, texts[i], strlen(texts[i])) == (ssize_t)strlen(texts[i]));
        CHECK(syscall(SYS_flock, fd, LOCK_EX) == 0);
        CHECK(acquire(1) == TMS_DEVICE_LOCKED);
        CHECK(!strstr(error.message, "Process") && !strstr(error.message, "evil"));
        close(fd);
    }
    CHECK(acquire(1) == TMS_OK);
}

static void hold_without_a_name(void) {
    char text[1024], call[64];
    snprintf(call, sizeof call, "pwrite failed with errno %d", ENOSPC);
    captured_stderr_t captured = capture_begin();
    errno = 0;
    tms_status_t status = acquire(1);
    capture_end(captured, text, sizeof text);
    CHECK(status == TMS_OK && is_locked(0));
    CHECK(strstr(text, call) && strstr(text, file_of(0)));
}

static void hold_without_a_name_where_it_cannot_be_written(void) {
    fault.pwrite_error = ENOSPC;
    hold_without_a_name();
}

static void hold_without_a_name_where_a_part_of_it_is_written(void) {
    fault.pwrite_is_short = true;
    hold_without_a_name();
}

/* The default directory is one in which every user can create files: here that of a user that no other test uses. */
static void refuse_a_default_directory_that_others_can_use(void) {
    char directory[64];
    struct stat found;
    uid_t user = SOMEBODY_ELSE + (uid_t)getpid();
    if (geteuid() != 0) exit(SKIPPED); /* only root can be another user */
    CHECK(acquire(1) == TMS_OK);       /* what the simulated GPU makes is root's */
    tms_device_locks_release(locks(), 1);
    locks()->directory = "";
    CHECK(seteuid(user) == 0);
    snprintf(directory, sizeof directory, "/tmp/torch_memory_saver-%lu", (unsigned long)user);
    CHECK(symlink("/tmp", directory) == 0);
    CHECK(acquire(1) == TMS_INVALID_STATE && error.os_error == ENOTDIR);
    CHECK(unlink(directory) == 0 && mkdir(directory, 0700) == 0 && chmod(directory, 0750) == 0);
    CHECK(acquire(1) == TMS_INVALID_STATE && error.os_error == EPERM && strstr(error.message, "others cannot use it"));
    CHECK(rmdir(directory) == 0);
    CHECK(acquire(1) == TMS_OK);
    CHECK(stat(directory, &found) == 0 && (found.st_mode & 07777) == 0700);
    CHECK(seteuid(0) == 0 && remove_temporary_directory(directory) == 0);
}

static CUresult reversed_uuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = (char)(200 - device); /* compared as unsigned */
    return CUDA_SUCCESS;
}
static CUresult same_uuid(CUuuid *uuid, CUdevice device) {
    (void)device;
    memset(uuid, 1, sizeof *uuid);
    return CUDA_SUCCESS;
}
static CUresult no_uuid(CUuuid *uuid, CUdevice device) {
    (void)uuid;
    return device == 1 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static void ask_the_driver_who_is_who(void) {
    CHECK(acquire(0) == TMS_OK);
    tms_state_t *state = tms_state(&error);
    CHECK(tms_devices_load(&state->devices, NULL, NULL, &context, &error) == TMS_OK);
    /* No other code changes the table. */
    tms_driver_table_t *table = (tms_driver_table_t *)(uintptr_t)atomic_load(&state->driver.table);
    table->cuDeviceGetUuid = same_uuid;
    CHECK(acquire(3) == TMS_DRIVER_UNAVAILABLE && strstr(error.message, "same UUID"));
    table->cuDeviceGetUuid = no_uuid;
    CHECK(acquire(3) == TMS_DRIVER && error.device == 1 && strcmp(error.call, "cuDeviceGetUuid") == 0);
    table->cuDeviceGetUuid = NULL;
    CHECK(acquire(1) == TMS_DRIVER_UNAVAILABLE && strstr(error.message, "cuDeviceGetUuid"));
    /* Device 1 comes first: if its lock is held elsewhere, that of device 0 is not even tried. */
    table->cuDeviceGetUuid = reversed_uuid;
    CHECK(mkdir(below("torch_memory_saver-GPU-c7000000-0000-0000-0000-000000000000.lock"), 0700) == 0);
    CHECK(acquire(3) == TMS_INVALID_STATE && error.device == 1);
    CHECK(access(below("torch_memory_saver-GPU-c8000000-0000-0000-0000-000000000000.lock"), F_OK) != 0);
    CHECK(acquire(1) == TMS_OK);
    CHECK(access(below("torch_memory_saver-GPU-c8000000-0000-0000-0000-000000000000.lock"), F_OK) == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        LOCKS(refuse_hostile_directories),
        LOCKS(refuse_foreign_owners),
        LOCKS(refuse_hostile_files),
        LOCKS(survive_failing_calls),
        LOCKS(notice_a_removed_file),
        LOCKS(notice_a_replaced_directory),
        LOCKS(fail_where_another_process_has_replaced_the_file),
        LOCKS(say_at_the_end_that_the_file_was_removed),
        LOCKS(wait_for_the_file_of_the_present_directory),
        LOCKS(name_the_holder),
        LOCKS(not_believe_what_is_no_name),
        LOCKS(hold_without_a_name_where_it_cannot_be_written),
        LOCKS(hold_without_a_name_where_a_part_of_it_is_written),
        LOCKS(refuse_a_default_directory_that_others_can_use),
        LOCKS(ask_the_driver_who_is_who),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
