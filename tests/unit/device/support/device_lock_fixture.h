/* Shared by the tests of the device locks, each of which runs in a process of its own. Included once in a program: it
 * defines flock and pwrite, which replace the C library's. */
#ifndef TMS_TESTS_DEVICE_LOCK_FIXTURE_H
#define TMS_TESTS_DEVICE_LOCK_FIXTURE_H

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

#include "abi/start.h"
#include "captured_stderr.h"
#include "own_process.h"
#include "temporary.h"

enum { PATH_BYTES = TEMPORARY_BYTES, SOMEBODY_ELSE = 12345 };

static const tms_error_context_t context = {.operation = "resume", .device = TMS_NO_DEVICE};
static char base[PATH_BYTES];
static tms_error_t error;

/* Injected failures: the errno of the next flock calls that lock, and how many; that of every pwrite, and whether
 * each of them writes a part. */
static struct {
    int flock_error, flock_failures, pwrite_error;
    bool pwrite_is_short;
    bool remove_first; /* the file is removed before it is locked, once */
} fault;

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    if (fault.pwrite_is_short) return (ssize_t)bytes / 2;
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

/* In the test processes: prints the failure and ends the process with status 1. */
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

/* As on the simulated GPU: "Simulated GPU", two zero bytes and the number of the device. */
static const char *file_of(int device) {
    char name[PATH_BYTES];
    snprintf(name, sizeof(name), "torch_memory_saver-GPU-53696d75-6c61-7465-6420-4750550000%02x.lock", device);
    return below(name);
}

/* Whether any process, this one included, holds the lock of a device. */
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
    int keep; /* closing it makes the other process release its locks and end */
} holder_t;

/* Starts a process that holds locks; returns when it has them. Call it before this process uses the driver. */
static holder_t start_holder(tms_device_mask_t devices) {
    int ready[2], kept[2];
    char byte = 0;
    CHECK(pipe(ready) == 0 && pipe(kept) == 0);
    pid_t process = fork();
    CHECK(process >= 0);
    if (process == 0) {
        close(ready[0]);
        close(kept[1]);
        CHECK(acquire(devices) == TMS_OK);
        CHECK(write(ready[1], "h", 1) == 1);
        CHECK(read(kept[0], &byte, 1) == 0);
        tms_device_locks_release(locks(), devices);
        _exit(0);
    }
    close(ready[1]);
    close(kept[0]);
    CHECK(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    return (holder_t){.process = process, .keep = kept[1]};
}

static void end_holder(holder_t *holder) {
    close(holder->keep);
    CHECK(waitpid(holder->process, NULL, 0) == holder->process);
    holder->process = 0;
}

static void in_own_process(void **state) { assert_exits((void (*)(void))(uintptr_t)*state); }

#define LOCKS(body) {"locks_" #body, in_own_process, make, release, (void *)(uintptr_t)(body)}

#endif
