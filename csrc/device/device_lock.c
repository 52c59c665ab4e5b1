#include "device/device_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/private_directory.h"

enum {
    FILE_MODE = 0600,
    OTHERS = 077,          /* permissions that a lock file must not have */
    NAME_BYTES = 80,       /* "torch_memory_saver-GPU-<uuid>.lock" and its NUL */
    HOLDER_BYTES = 48,     /* a process id and a time, both decimal, separated by a space, and a newline */
    TIME_BYTES = 32,       /* "2026-01-02T03:04:05Z" and its NUL */
    REPLACED_ATTEMPTS = 8, /* attempts to lock a file that is removed each time */
    NOT_OPEN = -1
};

static const double first_pause_seconds = 0.001, longest_pause_seconds = 0.1;

/* A device to be locked. */
typedef struct wanted {
    int device;
    CUuuid uuid;
} wanted_t;

/* The holder of a lock, as recorded in its file. */
typedef struct holder {
    long process;    /* 0: not known */
    long long since; /* seconds since the epoch */
} holder_t;

/* A failure and the file that it concerns. */
typedef struct failure {
    const char *call;
    int os_error; /* EWOULDBLOCK: another process holds it */
    int device;
    bool replaced; /* this process holds a lock file that was removed, and another process the new one */
    holder_t holder;
    char path[PATH_MAX];
} failure_t;

/* A failure to record the holder. The lock does not depend on it. */
typedef struct unwritten {
    int os_error; /* 0: no failure */
    const char *call;
    char path[PATH_MAX];
} unwritten_t;

tms_status_t tms_device_locks_init(tms_device_locks_t *locks, const tms_config_t *config, tms_devices_t *devices,
                                   tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *locks = (tms_device_locks_t){.devices = devices, .directory = config->lock_directory};
    for (int i = 0; i < TMS_MAX_DEVICES; i++) locks->device[i].fd = NOT_OPEN;
    int os_error = pthread_mutex_init(&locks->mutex, NULL);
    return os_error == 0 ? TMS_OK : tms_error_set_os(error, &context, "pthread_mutex_init", ENOMEM, NULL);
}

void tms_device_locks_destroy(tms_device_locks_t *locks) {
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        if (locks->device[i].fd != NOT_OPEN) close(locks->device[i].fd);
    }
    pthread_mutex_destroy(&locks->mutex);
}

void tms_device_locks_after_fork_in_child(tms_device_locks_t *locks) {
    (void)pthread_mutex_init(&locks->mutex, NULL); /* it succeeded on this memory before */
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        /* Closed without unlocking, which would release the parent's lock. */
        if (locks->device[i].fd != NOT_OPEN) close(locks->device[i].fd);
        locks->device[i] = (tms_device_lock_t){.fd = NOT_OPEN};
    }
}

/* ---- files ---- */

static bool fail(failure_t *failure, const char *call, int os_error) {
    failure->call = call;
    failure->os_error = os_error;
    return false;
}

static tms_directory_choice_t directory_of(const tms_device_locks_t *locks) {
    return tms_private_directory(locks->directory, "/tmp");
}

/* Opens the directory, creating it if missing. Returns its descriptor, or NOT_OPEN and the failure. */
static int open_directory(const tms_device_locks_t *locks, failure_t *failure) {
    const tms_directory_choice_t directory = directory_of(locks);
    tms_directory_failure_t failed;
    int fd = tms_private_directory_open(&directory, failure->path, &failed);
    if (fd < 0) fail(failure, failed.call, failed.os_error);
    return fd < 0 ? NOT_OPEN : fd;
}

static int try_flock(int fd) {
    int result;
    do {
        result = flock(fd, LOCK_EX | LOCK_NB);
    } while (result != 0 && errno == EINTR);
    return result;
}

/* Extends the directory's path to that of a file in it. */
static void append_name(failure_t *failure, const char *name) {
    size_t length = strlen(failure->path);
    snprintf(failure->path + length, sizeof(failure->path) - length, "/%s", name);
}

/* Whether an open file is still the one at its path. */
static bool find_current(int fd, bool *current, failure_t *failure) {
    struct stat held, named;
    if (fstat(fd, &held) != 0) return fail(failure, "fstat", errno);
    bool found = fstatat(AT_FDCWD, failure->path, &named, AT_SYMLINK_NOFOLLOW) == 0;
    if (!found && errno != ENOENT && errno != ENOTDIR) return fail(failure, "fstatat", errno);
    *current = found && named.st_dev == held.st_dev && named.st_ino == held.st_ino;
    return true;
}

/* Reads the holder for messages. Only the kernel knows whether the lock is held. */
static holder_t read_holder(int fd) {
    char text[HOLDER_BYTES + 1], end = 0;
    holder_t holder = {0};
    ssize_t length = pread(fd, text, HOLDER_BYTES, 0);
    if (length <= 0) return holder;
    text[length] = '\0';
    if (sscanf(text, "%ld %lld%c", &holder.process, &holder.since, &end) != 3 || end != '\n' || holder.process <= 0)
        holder.process = 0;
    return holder;
}

static void write_holder(int fd, const char *path, unwritten_t *unwritten) {
    char text[HOLDER_BYTES];
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    int length = snprintf(text, sizeof(text), "%ld %lld\n", (long)getpid(), (long long)now.tv_sec);
    const char *failed = NULL;
    if (ftruncate(fd, 0) != 0)
        failed = "ftruncate";
    else if (pwrite(fd, text, (size_t)length, 0) != length)
        failed = "pwrite";
    if (!failed) return;
    unwritten->os_error = errno;
    unwritten->call = failed;
    snprintf(unwritten->path, sizeof(unwritten->path), "%s", path);
}

/* Locks an open file. *current: whether the file is still the one at its path. */
static bool lock_file(int fd, bool *current, failure_t *failure) {
    struct stat found;
    if (fstat(fd, &found) != 0) return fail(failure, "fstat", errno);
    if (!S_ISREG(found.st_mode) || found.st_uid != geteuid())
        return fail(failure, "the check that it is a regular file of this user's", EPERM);
    /* Another user who can read the file could lock it. */
    if ((found.st_mode & OTHERS) && fchmod(fd, FILE_MODE) != 0) return fail(failure, "fchmod", errno);
    if (try_flock(fd) == 0) return find_current(fd, current, failure);
    int os_error = errno;
    if (os_error == EWOULDBLOCK) failure->holder = read_holder(fd);
    return fail(failure, "flock", os_error);
}

/* Opens and locks the file with this name. Returns its descriptor, or NOT_OPEN and the failure. */
static int open_locked(const tms_device_locks_t *locks, const char *name, failure_t *failure) {
    bool locked = true, current = false;
    for (int attempt = 0; locked && attempt < REPLACED_ATTEMPTS; attempt++) {
        int directory = open_directory(locks, failure);
        if (directory == NOT_OPEN) return NOT_OPEN;
        /* O_NONBLOCK: opening a FIFO must not wait for its other end. */
        int fd = openat(directory, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, FILE_MODE);
        int os_error = errno;
        close(directory);
        append_name(failure, name);
        locked = fd >= 0 ? lock_file(fd, &current, failure) : fail(failure, "openat", os_error);
        if (locked && current) return fd;
        if (fd >= 0) close(fd);
    }
    /* A lock on a file that other processes cannot find excludes none of them. */
    if (locked) fail(failure, "flock of a file that is removed again and again", ESTALE);
    return NOT_OPEN;
}

static void write_name(char name[NAME_BYTES], const CUuuid *uuid) {
    char text[TMS_UUID_BYTES];
    tms_device_write_uuid(uuid, text);
    snprintf(name, NAME_BYTES, "torch_memory_saver-%s.lock", text);
}

/* ---- counts; all under the mutex ---- */

static void unlock(tms_device_lock_t *lock) {
    /* If this fails, messages name this holder until the next one has written its own id. */
    int emptied = ftruncate(lock->fd, 0);
    (void)emptied;
    /* Unlocked first: closing alone would leave the lock held by a child between fork and exec. */
    (void)flock(lock->fd, LOCK_UN);
    close(lock->fd);
    lock->fd = NOT_OPEN;
}

/* False if the file was removed while it was locked: another process may have locked a new one. */
static bool release_one(tms_device_lock_t *lock) {
    struct stat found;
    if (lock->count == 0 || --lock->count > 0) return true;
    bool named = fstat(lock->fd, &found) != 0 || found.st_nlink > 0;
    unlock(lock);
    return named;
}

/* Opens and locks the file of a device. A held file that has been removed or replaced is opened anew. */
static bool lock_device(const tms_device_locks_t *locks, tms_device_lock_t *lock, const wanted_t *wanted,
                        unwritten_t *unwritten, failure_t *failure) {
    char name[NAME_BYTES];
    bool current = false;
    write_name(name, &wanted->uuid);
    failure->device = wanted->device;
    if (lock->count > 0) {
        const tms_directory_choice_t directory = directory_of(locks);
        if (!tms_directory_path(&directory, failure->path)) return fail(failure, "open", ENAMETOOLONG);
        append_name(failure, name);
        if (!find_current(lock->fd, &current, failure)) return false;
        if (current) return true;
    }
    int fd = open_locked(locks, name, failure);
    failure->replaced = lock->count > 0;
    if (fd == NOT_OPEN) return false;
    if (lock->count > 0) close(lock->fd);
    lock->fd = fd;
    write_holder(fd, failure->path, unwritten);
    return true;
}

/* Adds one count for each wanted device, or for none. */
static bool try_all(tms_device_locks_t *locks, const wanted_t *wanted, int count, unwritten_t *unwritten,
                    failure_t *failure) {
    int held = 0;
    failure->device = TMS_NO_DEVICE;
    failure->os_error = 0;
    failure->holder.process = 0;
    pthread_mutex_lock(&locks->mutex);
    for (; held < count; held++) {
        tms_device_lock_t *lock = &locks->device[wanted[held].device];
        if (!lock_device(locks, lock, &wanted[held], unwritten, failure)) break;
        lock->count++;
    }
    if (held < count) {
        for (int i = 0; i < held; i++) (void)release_one(&locks->device[wanted[i].device]);
    }
    pthread_mutex_unlock(&locks->mutex);
    return held == count;
}

/* ---- acquire and release ---- */

/* The devices of the mask with their UUIDs, in order of UUID. */
static tms_status_t list_devices(tms_device_locks_t *locks, tms_device_mask_t devices, wanted_t wanted[TMS_MAX_DEVICES],
                                 int *count, const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    int found = 0;
    tms_status_t status = tms_devices_load(locks->devices, &driver, &table, context, error);
    for (int i = 0; status == TMS_OK && i < table->count; i++) {
        if (!(devices >> i & 1)) continue;
        wanted_t one = {.device = i};
        tms_error_context_t here = *context;
        here.device = i;
        status = TMS_DRIVER_CALL(driver, &here, error, cuDeviceGetUuid, &one.uuid, table->device[i].handle);
        if (status != TMS_OK) break;
        int place = found++;
        for (; place > 0 && memcmp(&wanted[place - 1].uuid, &one.uuid, sizeof(one.uuid)) > 0; place--)
            wanted[place] = wanted[place - 1];
        if (place > 0 && memcmp(&wanted[place - 1].uuid, &one.uuid, sizeof(one.uuid)) == 0) {
            status = tms_error_set(
                error, TMS_DRIVER_UNAVAILABLE, &here,
                "the driver reports the same UUID for this device and device %d, so they cannot be locked separately",
                wanted[place - 1].device);
        }
        wanted[place] = one;
    }
    if (status == TMS_OK) *count = found;
    return status;
}

/* Appends the process id and the start time of the holder, if known. */
static void describe_holder(const holder_t *holder, tms_error_t *error) {
    struct tm utc;
    char since[TIME_BYTES] = "";
    time_t seconds = (time_t)holder->since;
    if (!error || holder->process == 0) return;
    if (gmtime_r(&seconds, &utc)) strftime(since, sizeof(since), "%Y-%m-%dT%H:%M:%SZ", &utc);
    tms_error_append(error, " Process %ld has held it since %s.", holder->process, since[0] ? since : "an unknown time");
    /* The id is meaningless here if the holder runs in another PID namespace or on another machine that shares the
     * directory. */
    if (kill((pid_t)holder->process, 0) != 0 && errno == ESRCH)
        tms_error_append(error, " That process is not visible here: it is in another PID namespace, or has just ended.");
}

static tms_status_t report(const failure_t *failure, const tms_wait_t *wait, const tms_error_context_t *context,
                           tms_error_t *error) {
    char reason[TMS_ERROR_NAME_BYTES];
    tms_error_context_t here = *context;
    if (failure->device != TMS_NO_DEVICE) here.device = failure->device;
    if (failure->os_error == EWOULDBLOCK) {
        tms_error_set(error, TMS_DEVICE_LOCKED, &here, "waited %.3f seconds for '%s'%s", wait ? tms_wait_elapsed(wait) : 0.0,
                      failure->path,
                      failure->replaced ? ". It has replaced the lock file that this process holds, because that file was "
                                          "removed: do not remove lock files"
                                        : "");
        describe_holder(&failure->holder, error);
        return TMS_DEVICE_LOCKED;
    }
    tms_status_t status = failure->os_error == ENOMEM ? TMS_OUT_OF_HOST_MEMORY : TMS_INVALID_STATE;
    tms_error_set(error, status, &here,
                  "the lock '%s' cannot be used: %s failed with errno %d (%s). TMS_LOCK_DIR chooses another directory",
                  failure->path, failure->call, failure->os_error, strerror_r(failure->os_error, reason, sizeof(reason)));
    if (error) {
        error->os_error = failure->os_error;
        snprintf(error->call, sizeof(error->call), "%s", failure->call);
    }
    return status;
}

tms_status_t tms_device_locks_acquire(tms_device_locks_t *locks, tms_device_mask_t devices, tms_wait_t *wait,
                                      const tms_error_context_t *context, tms_error_t *error) {
    wanted_t wanted[TMS_MAX_DEVICES];
    failure_t failure;
    unwritten_t unwritten = {.os_error = 0};
    int count = 0;
    if (!devices) return TMS_OK;
    tms_status_t status = list_devices(locks, devices, wanted, &count, context, error);
    double pause = first_pause_seconds;
    while (status == TMS_OK && !try_all(locks, wanted, count, &unwritten, &failure)) {
        bool held = failure.os_error == EWOULDBLOCK;
        if (!held || !wait || tms_wait_remaining(wait) <= 0) return report(&failure, wait, context, error);
        status = tms_wait_sleep(wait, pause, context, error);
        pause = pause * 2 < longest_pause_seconds ? pause * 2 : longest_pause_seconds;
    }
    if (unwritten.os_error != 0)
        tms_log_write(locks->devices->driver->log, TMS_LOG_WARNING,
                      "%s: the id of this process could not be written to the lock file '%s': %s failed with errno %d. The "
                      "device is locked, but other processes are not told by which process.",
                      context->operation, unwritten.path, unwritten.call, unwritten.os_error);
    return status;
}

void tms_device_locks_retain(tms_device_locks_t *locks, int device) {
    pthread_mutex_lock(&locks->mutex);
    if (locks->device[device].count > 0) locks->device[device].count++;
    pthread_mutex_unlock(&locks->mutex);
}

void tms_device_locks_release(tms_device_locks_t *locks, tms_device_mask_t devices) {
    tms_device_mask_t removed = 0;
    if (!devices) return;
    pthread_mutex_lock(&locks->mutex);
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        if ((devices >> i & 1) && !release_one(&locks->device[i])) removed |= (tms_device_mask_t)1 << i;
    }
    pthread_mutex_unlock(&locks->mutex);
    for (int i = 0; removed >> i; i++) {
        if (!(removed >> i & 1)) continue;
        tms_log_write(locks->devices->driver->log, TMS_LOG_WARNING,
                      "the lock file of device %d was removed while this process held it: another process may have held the "
                      "lock at the same time. Do not remove lock files; TMS_LOCK_DIR chooses another directory.",
                      i);
    }
}
