/* The locks of the devices, between processes. Each test runs in a process of its own, and nobody uses the driver before
 * forking: a forked child could not use it then. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "captured_stderr.h"
#include "own_process.h"
#include "state.h"
#include "temporary.h"

enum { PATH_BYTES = TEMPORARY_BYTES, SOMEBODY_ELSE = 12345 };

static const tms_error_context_t context = {.operation = "resume", .device = TMS_NO_DEVICE};
static char base[PATH_BYTES];
static tms_error_t error;

/* Faults in the process of a test: the errno of the next calls of flock that lock, and how many; that of every pwrite. */
static struct {
    int flock_error, flock_failures, pwrite_error;
    bool remove_first; /* the file is removed before it is locked, once */
} fault;

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    if (fault.pwrite_error == 0) return syscall(SYS_pwrite64, fd, data, bytes, offset);
    errno = fault.pwrite_error;
    return -1;
}

int flock(int fd, int operation) {
    if (!(operation & LOCK_UN) && fault.flock_failures > 0) {
        fault.flock_failures--;
        errno = fault.flock_error;
        return -1;
    }
    if (fault.remove_first) {
        char link[64], path[2 * PATH_BYTES];
        fault.remove_first = false;
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof(path) - 1);
        if (length > 0) path[length] = '\0';
        if (length <= 0 || unlink(path) != 0) abort();
    }
    return (int)syscall(SYS_flock, fd, operation);
}

/* In the processes of the tests: says what is wrong and ends the process with status 1. */
#define CHECK(condition)                                                                                                    \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, error.message);                             \
            _exit(1);                                                                                                       \
        }                                                                                                                   \
    } while (0)

static int make(void **state) {
    (void)state;
    if (!make_temporary_directory(base, "lock")) return -1;
    setenv("TMS_SIMULATED_DEVICES", "2", 1);
    return setenv("TMS_LOCK_DIR", base, 1);
}

static int release(void **state) {
    (void)state;
    return remove_temporary_directory(base);
}

static tms_device_locks_t *locks(void) {
    tms_state_t *state = tms_state(&error);
    CHECK(state);
    return &state->saver.device_locks;
}

static tms_status_t acquire(tms_device_mask_t devices) {
    return tms_device_locks_acquire(locks(), devices, NULL, &context, &error);
}

static const char *below(const char *name) {
    static char paths[4][2 * PATH_BYTES];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", base, name);
    return path;
}

/* As the simulated GPU has it: "Simulated GPU", two zero bytes and the number of the device. */
static const char *file_of(int device) {
    char name[PATH_BYTES];
    snprintf(name, sizeof(name), "torch_memory_saver-GPU-53696d75-6c61-7465-6420-4750550000%02x.lock", device);
    return below(name);
}

/* Whether anybody, this process included, holds the lock of a device. */
static bool is_locked(int device) {
    int fd = open(file_of(device), O_RDWR | O_CLOEXEC);
    if (fd < 0) return false;
    bool locked = syscall(SYS_flock, fd, LOCK_EX | LOCK_NB) != 0;
    close(fd);
    return locked;
}

static int open_descriptors(void) {
    int count = 0;
    DIR *stream = opendir("/proc/self/fd");
    CHECK(stream);
    while (readdir(stream)) count++;
    closedir(stream);
    return count;
}

/* ---- another process ---- */

typedef struct holder {
    pid_t process;
    int keep; /* closing it tells the other process to let go and end */
} holder_t;

/* Starts a process that holds locks; returns when it has them. Before the first use of the driver in this one. */
static holder_t start_holder(tms_device_mask_t devices) {
    int told[2], kept[2];
    char byte = 0;
    CHECK(pipe(told) == 0 && pipe(kept) == 0);
    pid_t process = fork();
    CHECK(process >= 0);
    if (process == 0) {
        close(told[0]);
        close(kept[1]);
        CHECK(acquire(devices) == TMS_OK);
        CHECK(write(told[1], "h", 1) == 1);
        CHECK(read(kept[0], &byte, 1) == 0);
        tms_device_locks_release(locks(), devices);
        _exit(0);
    }
    close(told[1]);
    close(kept[0]);
    CHECK(read(told[0], &byte, 1) == 1);
    close(told[0]);
    return (holder_t){.process = process, .keep = kept[1]};
}

static void end_holder(holder_t *holder) {
    close(holder->keep);
    CHECK(waitpid(holder->process, NULL, 0) == holder->process);
    holder->process = 0;
}

/* ---- bodies ---- */

static void count_per_device(void) {
    CHECK(acquire(0) == TMS_OK);
    CHECK(!is_locked(0));
    CHECK(acquire(3) == TMS_OK);
    CHECK(is_locked(0) && is_locked(1));
    CHECK(acquire(1) == TMS_OK);
    tms_device_locks_retain(locks(), 1);
    tms_device_locks_release(locks(), 3);
    CHECK(is_locked(0) && is_locked(1));
    tms_device_locks_release(locks(), 1);
    CHECK(!is_locked(0) && is_locked(1));
    tms_device_locks_release(locks(), 2);
    CHECK(!is_locked(1));
    tms_device_locks_release(locks(), 3); /* one too many is nothing */
    tms_device_locks_retain(locks(), 0);  /* and what is not held cannot be held once more */
    CHECK(!is_locked(0) && !is_locked(1));
    CHECK(acquire(1) == TMS_OK && is_locked(0));
    tms_device_locks_release(locks(), 1);
    CHECK(!is_locked(0));
}

static void make_private_files(void) {
    struct stat found;
    umask(0);
    setenv("TMS_LOCK_DIR", below("made//"), 1);
    CHECK(acquire(1) == TMS_OK);
    CHECK(stat(below("made"), &found) == 0 && (found.st_mode & 07777) == 0700);
    DIR *stream = opendir(below("made"));
    CHECK(stream);
    for (const struct dirent *entry; (entry = readdir(stream));) {
        if (entry->d_name[0] == '.') continue;
        CHECK(strncmp(entry->d_name, "torch_memory_saver-GPU-", 23) == 0);
        CHECK(fstatat(dirfd(stream), entry->d_name, &found, 0) == 0 && (found.st_mode & 07777) == 0600);
    }
    closedir(stream);
}

static void leave_no_descriptor(void) {
    CHECK(acquire(3) == TMS_OK); /* the driver's own are open now */
    tms_device_locks_release(locks(), 3);
    int before = open_descriptors();
    CHECK(acquire(3) == TMS_OK);
    CHECK(open_descriptors() == before + 2);
    tms_device_locks_release(locks(), 3);
    CHECK(open_descriptors() == before);
}

static void exclude_another_process_until_it_lets_go(void) {
    holder_t holder = start_holder(1);
    CHECK(acquire(1) == TMS_DEVICE_LOCKED);
    CHECK(error.device == 0 && strstr(error.message, file_of(0)));
    CHECK(acquire(2) == TMS_OK); /* the other device is free */
    end_holder(&holder);
    CHECK(acquire(1) == TMS_OK);
}

static void exclude_another_process_until_it_is_killed(void) {
    holder_t holder = start_holder(3);
    CHECK(acquire(2) == TMS_DEVICE_LOCKED);
    CHECK(kill(holder.process, SIGKILL) == 0 && waitpid(holder.process, NULL, 0) == holder.process);
    CHECK(acquire(3) == TMS_OK);
}

static void take_all_or_none(void) {
    holder_t holder = start_holder(2);
    CHECK(acquire(3) == TMS_DEVICE_LOCKED);
    CHECK(error.device == 1);
    CHECK(!is_locked(0)); /* the first was taken and given back */
    CHECK(acquire(1) == TMS_OK);
    CHECK(acquire(3) == TMS_DEVICE_LOCKED);
    tms_device_locks_release(locks(), 1);
    CHECK(!is_locked(0)); /* the failure has left no count */
    end_holder(&holder);
    CHECK(acquire(3) == TMS_OK);
}

static int questions;

static int32_t let_the_holder_go(void *argument) {
    holder_t *holder = argument;
    questions++;
    if (holder->process) end_holder(holder);
    return 0;
}

static int32_t stop(void *argument) {
    (void)argument;
    questions++;
    return 1;
}

static void wait_until_the_other_lets_go(void) {
    tms_wait_t wait;
    holder_t holder = start_holder(1);
    tms_wait_begin(&wait, let_the_holder_go, &holder, INFINITY);
    CHECK(tms_device_locks_acquire(locks(), 3, &wait, &context, &error) == TMS_OK);
    CHECK(questions > 0 && holder.process == 0);
    CHECK(is_locked(0) && is_locked(1));
}

static void stop_waiting_when_told_to(void) {
    tms_wait_t wait;
    holder_t holder = start_holder(1);
    tms_wait_begin(&wait, stop, NULL, INFINITY);
    CHECK(tms_device_locks_acquire(locks(), 3, &wait, &context, &error) == TMS_INTERRUPTED);
    CHECK(questions == 1 && !is_locked(1));
    end_holder(&holder);
    CHECK(!is_locked(0));
}

static void stop_waiting_when_time_is_up(void) {
    tms_wait_t wait;
    holder_t holder = start_holder(1);
    tms_wait_begin(&wait, NULL, NULL, 0.01);
    CHECK(tms_device_locks_acquire(locks(), 3, &wait, &context, &error) == TMS_DEVICE_LOCKED);
    const char *said = strstr(error.message, "waited ");
    double waited = said ? strtod(said + strlen("waited "), NULL) : 0;
    CHECK(waited >= 0.01 && waited <= tms_wait_elapsed(&wait) + 0.001); /* it is rounded to milliseconds */
    end_holder(&holder);
}

/* The parent's lock outlives a child that ends, and a child does not outlive the parent with it. */
static void belong_to_the_parent(void) {
    int ready[2], kept[2];
    char byte = 0;
    CHECK(pipe(ready) == 0 && pipe(kept) == 0);
    pid_t owner = fork();
    CHECK(owner >= 0);
    if (owner == 0) {
        CHECK(acquire(3) == TMS_OK);
        pid_t ended = fork(); /* the handlers of process.c run */
        if (ended == 0) _exit(locks()->device[0].count == 0 && locks()->device[0].fd < 0 ? 0 : 1);
        int status = -1;
        CHECK(waitpid(ended, &status, 0) == ended && status == 0);
        CHECK(is_locked(0) && is_locked(1));
        tms_device_locks_release(locks(), 2);
        if (fork() == 0) {
            /* Outlives its parent, with no copy of the descriptor. */
            CHECK(write(ready[1], "r", 1) == 1);
            close(kept[1]);
            _exit(read(kept[0], &byte, 1) == 0 ? 0 : 1);
        }
        CHECK(is_locked(0) && !is_locked(1));
        pause();
        _exit(1);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK(is_locked(0));
    CHECK(kill(owner, SIGKILL) == 0 && waitpid(owner, NULL, 0) == owner);
    CHECK(!is_locked(0));
    close(kept[1]); /* ends the grandchild */
}

static void refuse(const char *directory, int os_error, const char *said) {
    char named[2 * PATH_BYTES];
    snprintf(named, sizeof(named), "'%s", directory);
    if (named[strlen(named) - 1] == '/') named[strlen(named) - 1] = '\0';
    /* The state, and with it the configuration, is made once in a process. */
    locks()->directory = directory;
    int before = open_descriptors();
    CHECK(acquire(3) == TMS_INVALID_STATE);
    CHECK(error.os_error == os_error);
    CHECK(strstr(error.message, named) && strstr(error.message, said) && strstr(error.message, "TMS_LOCK_DIR"));
    CHECK(open_descriptors() == before);
    CHECK(locks()->device[0].count == 0 && locks()->device[1].count == 0);
}

static void refuse_hostile_directories(void) {
    CHECK(acquire(1) == TMS_OK); /* loads the driver, whose descriptors are not ours to count */
    tms_device_locks_release(locks(), 1);
    CHECK(mkdir(below("real"), 0700) == 0 && symlink(below("real"), below("link")) == 0);
    refuse(below("link"), ENOTDIR, "open");
    refuse(below("link/"), ENOTDIR, "open");
    CHECK(rmdir(below("real")) == 0);       /* empty: nobody went through the link */
    refuse(below("link"), ENOTDIR, "open"); /* a link to nowhere */
    CHECK(fclose(fopen(below("file"), "w")) == 0);
    refuse(below("file"), ENOTDIR, "open");
    refuse(below("missing/below"), ENOENT, "mkdir");
    refuse("relative", EINVAL, "not absolute");
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
    if (geteuid() != 0) exit(SKIPPED); /* only root can make files of somebody else's */
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
    refuse(base, ELOOP, "open");
    CHECK(unlink(file_of(1)) == 0 && mkfifo(file_of(1), 0600) == 0);
    refuse(base, EPERM, "regular");
    CHECK(unlink(file_of(1)) == 0 && mkdir(file_of(1), 0700) == 0);
    refuse(base, EISDIR, "open");
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
    fault.remove_first = true; /* a lock on a file without a name would keep nobody away */
    CHECK(acquire(1) == TMS_OK && is_locked(0));
    tms_device_locks_release(locks(), 1);
    /* Who cannot see whether its lock file is still there does not rely on it. */
    CHECK(acquire(1) == TMS_OK);
    locks()->directory = "/nowhere/at/all";
    CHECK(acquire(1) == TMS_INVALID_STATE && strstr(error.message, "mkdir"));
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
        CHECK(acquire(2) == TMS_OK);          /* the other device is not concerned */
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
    CHECK(kill(*process, 0) == 0); /* still holds the lock that lies elsewhere now */
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

/* ---- what a file says of its holder ---- */

static void name_the_holder(void) {
    char said[64];
    holder_t holder = start_holder(1);
    time_t now = time(NULL);
    CHECK(acquire(1) == TMS_DEVICE_LOCKED);
    snprintf(said, sizeof said, "Process %ld has held it since 2", (long)holder.process);
    const char *since = strstr(error.message, said);
    struct tm utc = {0};
    CHECK(since && strptime(since + strlen(said) - 1, "%Y-%m-%dT%H:%M:%SZ", &utc));
    CHECK(now - timegm(&utc) >= 0 && now - timegm(&utc) < 60);
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

static void hold_without_a_name_where_it_cannot_be_written(void) {
    char text[1024];
    fault.pwrite_error = ENOSPC;
    captured_stderr_t captured = capture_begin();
    tms_status_t status = acquire(1);
    capture_end(captured, text, sizeof text);
    CHECK(status == TMS_OK && is_locked(0));
    CHECK(strstr(text, "pwrite") && strstr(text, file_of(0)));
}

/* The default directory lies where everybody can make files: of a user that nobody else tests with. */
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
    /* The table is never changed by anybody else. */
    tms_driver_table_t *table = (tms_driver_table_t *)(uintptr_t)atomic_load(&state->driver.table);
    table->cuDeviceGetUuid = same_uuid;
    CHECK(acquire(3) == TMS_DRIVER_UNAVAILABLE && strstr(error.message, "same UUID"));
    table->cuDeviceGetUuid = no_uuid;
    CHECK(acquire(3) == TMS_DRIVER && error.device == 1 && strcmp(error.call, "cuDeviceGetUuid") == 0);
    table->cuDeviceGetUuid = NULL;
    CHECK(acquire(1) == TMS_DRIVER_UNAVAILABLE && strstr(error.message, "cuDeviceGetUuid"));
    /* Device 1 comes first: where its lock is held, that of device 0 is not even tried. */
    table->cuDeviceGetUuid = reversed_uuid;
    CHECK(mkdir(below("torch_memory_saver-GPU-c7000000-0000-0000-0000-000000000000.lock"), 0700) == 0);
    CHECK(acquire(3) == TMS_INVALID_STATE && error.device == 1);
    CHECK(access(below("torch_memory_saver-GPU-c8000000-0000-0000-0000-000000000000.lock"), F_OK) != 0);
    CHECK(acquire(1) == TMS_OK);
    CHECK(access(below("torch_memory_saver-GPU-c8000000-0000-0000-0000-000000000000.lock"), F_OK) == 0);
}

#define TESTS(X)                                                                                                            \
    X(count_per_device)                                                                                                     \
    X(make_private_files)                                                                                                   \
    X(leave_no_descriptor)                                                                                                  \
    X(exclude_another_process_until_it_lets_go)                                                                             \
    X(exclude_another_process_until_it_is_killed)                                                                           \
    X(take_all_or_none)                                                                                                     \
    X(wait_until_the_other_lets_go)                                                                                         \
    X(stop_waiting_when_told_to)                                                                                            \
    X(stop_waiting_when_time_is_up)                                                                                         \
    X(belong_to_the_parent)                                                                                                 \
    X(refuse_hostile_directories)                                                                                           \
    X(refuse_foreign_owners)                                                                                                \
    X(refuse_hostile_files)                                                                                                 \
    X(survive_failing_calls)                                                                                                \
    X(notice_a_removed_file)                                                                                                \
    X(notice_a_replaced_directory)                                                                                          \
    X(fail_where_another_process_has_replaced_the_file)                                                                     \
    X(say_at_the_end_that_the_file_was_removed)                                                                             \
    X(wait_for_the_file_of_the_present_directory)                                                                           \
    X(name_the_holder)                                                                                                      \
    X(not_believe_what_is_no_name)                                                                                          \
    X(hold_without_a_name_where_it_cannot_be_written)                                                                       \
    X(refuse_a_default_directory_that_others_can_use)                                                                       \
    X(ask_the_driver_who_is_who)

#define DEFINE(body)                                                                                                        \
    static void locks_##body(void **state) {                                                                                \
        (void)state;                                                                                                        \
        assert_exits(body);                                                                                                 \
    }
TESTS(DEFINE)
#undef DEFINE

int main(void) {
    const struct CMUnitTest tests[] = {
#define ENTRY(body) cmocka_unit_test_setup_teardown(locks_##body, make, release),
        TESTS(ENTRY)
#undef ENTRY
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
