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

#include "base/identity.h"

enum {
    NAME_BYTES = 80,       /* "torch_memory_saver-GPU-<uuid>.lock" and its NUL */
    TIME_BYTES = 32,       /* "2026-01-02T03:04:05Z" and its NUL */
    COMMAND_BYTES = 32,    /* the kernel's short name of a process, " (", ")" and its NUL */
    PROC_PATH_BYTES = 64,  /* "/proc/<pid>/comm" and its NUL */
    REPLACED_ATTEMPTS = 8, /* attempts to lock a file that is removed each time */
    NOT_OPEN = -1
};

/* The delay before another attempt is doubled from the first to the maximum. The next request to be served polls at the
 * shorter interval. */
static const double first_delay_seconds = 0.001, max_delay_seconds = 0.1, max_delay_in_front_seconds = 0.01;

/* A device to be locked. */
typedef struct wanted {
    int device;
    CUuuid uuid;
} wanted_t;

/* A failure to record the holder. The lock does not depend on it. */
typedef struct unwritten {
    int os_error; /* 0: no failure */
    const char *call;
    char path[PATH_MAX];
} unwritten_t;

tms_status_t tms_device_locks_init(tms_device_locks_t *locks, const tms_config_t *config, tms_devices_t *devices,
                                   tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *locks = (tms_device_locks_t){.devices = devices,
                                  .directory = config->lock_directory,
                                  .queue = {.log = devices->driver->log, .patience = TMS_QUEUE_PATIENCE}};
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
    tms_device_queue_after_fork_in_child(&locks->queue);
}

/* ---- files ---- */

static void write_holder(int fd, const char *path, unwritten_t *unwritten) {
    char text[TMS_LOCK_RECORD_BYTES];
    int length = tms_lock_record_write(text);
    const char *call = "ftruncate";
    ssize_t written = -1;
    if (ftruncate(fd, 0) == 0) {
        call = "pwrite";
        written = pwrite(fd, text, (size_t)length, 0);
    }
    if (written == length) return;
    unwritten->os_error = written < 0 ? errno : ENOSPC;
    unwritten->call = call;
    snprintf(unwritten->path, sizeof(unwritten->path), "%s", path);
}

/* Locks an open file. *current: whether the file is still the one at its path. */
static bool lock_file(int fd, bool *current, tms_lock_failure_t *failure) {
    int os_error = tms_lock_file_try(fd);
    if (os_error == 0) return tms_lock_file_find_current(fd, current, failure);
    if (os_error == EWOULDBLOCK) failure->holder = tms_lock_record_read(fd);
    return tms_lock_fail(failure, "flock", os_error);
}

/* Opens and locks the file with this name. Returns its descriptor, or NOT_OPEN and the failure. */
static int open_locked(const tms_device_locks_t *locks, const char *name, tms_lock_failure_t *failure) {
    bool locked = true, current = false;
    for (int attempt = 0; locked && attempt < REPLACED_ATTEMPTS; attempt++) {
        int directory = tms_lock_directory_open(locks->directory, failure);
        if (directory < 0) return NOT_OPEN;
        int fd = tms_lock_file_open(directory, name, O_CREAT, failure);
        close(directory);
        tms_lock_append_name(failure, name);
        locked = fd >= 0 && lock_file(fd, &current, failure);
        if (locked && current) return fd;
        if (fd >= 0) close(fd);
    }
    /* A lock on a file that other processes cannot find excludes none of them. */
    if (locked) tms_lock_fail(failure, "flock of a file that is removed again and again", ESTALE);
    return NOT_OPEN;
}

static void write_name(char name[NAME_BYTES], const char *uuid) {
    snprintf(name, NAME_BYTES, "torch_memory_saver-%s.lock", uuid);
}

/* Writes the path of a device's file. False if it is too long. */
static bool write_path(const tms_device_locks_t *locks, const char *uuid, tms_lock_failure_t *failure) {
    const tms_directory_choice_t directory = tms_lock_directory(locks->directory);
    char name[NAME_BYTES];
    if (!tms_directory_path(&directory, failure->path)) return tms_lock_fail(failure, "open", ENAMETOOLONG);
    write_name(name, uuid);
    tms_lock_append_name(failure, name);
    return true;
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

/* Opens and locks the file of a device. A held file that has been removed or replaced is opened again. */
static bool lock_device(const tms_device_locks_t *locks, tms_device_lock_t *lock, const wanted_t *wanted,
                        unwritten_t *unwritten, tms_lock_failure_t *failure) {
    char name[NAME_BYTES];
    bool current = false;
    tms_device_write_uuid(&wanted->uuid, lock->uuid);
    write_name(name, lock->uuid);
    failure->device = wanted->device;
    if (lock->count > 0) {
        if (!write_path(locks, lock->uuid, failure)) return false;
        if (!tms_lock_file_find_current(lock->fd, &current, failure)) return false;
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
                    tms_lock_failure_t *failure) {
    int held = 0;
    for (; held < count; held++) {
        tms_device_lock_t *lock = &locks->device[wanted[held].device];
        if (!lock_device(locks, lock, &wanted[held], unwritten, failure)) break;
        lock->count++;
    }
    if (held < count) {
        for (int i = 0; i < held; i++) (void)release_one(&locks->device[wanted[i].device]);
    }
    return held == count;
}

/* Returns the devices that this process holds or wants. *missing: it does not hold all that it wants. */
static tms_queue_devices_t describe_devices(const tms_device_locks_t *locks, const wanted_t *wanted, int count,
                                            bool *missing) {
    tms_queue_devices_t devices = {0};
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        devices.device[i].held = locks->device[i].count > 0;
        if (devices.device[i].held) memcpy(devices.device[i].uuid, locks->device[i].uuid, TMS_UUID_BYTES);
    }
    *missing = false;
    for (int i = 0; i < count; i++) {
        devices.device[wanted[i].device].wanted = true;
        tms_device_write_uuid(&wanted[i].uuid, devices.device[wanted[i].device].uuid);
        if (!devices.device[wanted[i].device].held) *missing = true;
    }
    return devices;
}

/* One attempt to lock all wanted devices. After it, a request that may wait has a ticket. */
static bool attempt(tms_device_locks_t *locks, const wanted_t *wanted, int count, bool may_wait, tms_ticket_t *ticket,
                    unwritten_t *unwritten, tms_lock_failure_t *failure) {
    bool missing;
    *failure = (tms_lock_failure_t){.device = TMS_NO_DEVICE};
    pthread_mutex_lock(&locks->mutex);
    const tms_queue_devices_t devices = describe_devices(locks, wanted, count, &missing);
    bool done = (!missing || tms_device_queue_poll(&locks->queue, locks->directory, &devices, ticket, failure)) &&
                try_all(locks, wanted, count, unwritten, failure);
    if (!done && failure->os_error == EWOULDBLOCK && may_wait && !ticket->name[0])
        (void)tms_device_queue_enter(&locks->queue, locks->directory, &devices, ticket, failure);
    pthread_mutex_unlock(&locks->mutex);
    return done;
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

/* Writes " (<the short name of the process, as ps shows it>)", or "" if the process is not visible here. */
static void write_command(long process, char command[COMMAND_BYTES]) {
    char path[PROC_PATH_BYTES], name[COMMAND_BYTES - 3] = "";
    snprintf(path, sizeof(path), "/proc/%ld/comm", process);
    ssize_t length = tms_identity_read(path, name, sizeof(name) - 1);
    name[length < 0 ? 0 : length] = '\0';
    name[strcspn(name, "\n")] = '\0';
    for (char *c = name; *c; c++) {
        if (*c < ' ' || *c > '~') *c = '?'; /* a process chooses its name, and a terminal shows it */
    }
    command[0] = '\0';
    if (name[0]) snprintf(command, COMMAND_BYTES, " (%s)", name);
}

/* Appends the process of a record and its time, if known. `verb`: what it has done to the device since then. */
static void describe_process(const tms_lock_record_t *record, const char *verb, tms_error_t *error) {
    struct tm utc;
    char since[TIME_BYTES] = "", command[COMMAND_BYTES];
    time_t seconds = (time_t)record->since;
    if (!error || record->process == 0) return;
    if (gmtime_r(&seconds, &utc)) strftime(since, sizeof(since), "%Y-%m-%dT%H:%M:%SZ", &utc);
    write_command(record->process, command);
    tms_error_append(error, " Process %ld%s has %s it since %s.", record->process, command, verb,
                     since[0] ? since : "an unknown time");
    /* The id is meaningless here if the process runs in another PID namespace or on another machine that shares the
     * directory. */
    if (kill((pid_t)record->process, 0) != 0 && errno == ESRCH)
        tms_error_append(error, " That process is not visible here: it is in another PID namespace, or has just ended.");
    char state = tms_identity_state(record->process);
    if (state == 'T' || state == 't')
        tms_error_append(error, " That process is stopped, by a signal or a debugger: let it continue.");
}

/* Completes the failure of a request that others precede: with the file of the device, and who holds it now. */
static void find_holder(const tms_device_locks_t *locks, const wanted_t *wanted, int count, tms_lock_failure_t *failure) {
    char uuid[TMS_UUID_BYTES];
    for (int i = 0; i < count; i++) {
        if (wanted[i].device != failure->device) continue;
        tms_device_write_uuid(&wanted[i].uuid, uuid);
        if (!write_path(locks, uuid, failure)) return;
        int fd = open(failure->path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0) return;
        failure->holder = tms_lock_record_read(fd);
        close(fd);
    }
}

static tms_status_t report(const tms_lock_failure_t *failure, const tms_wait_t *wait, const tms_error_context_t *context,
                           tms_error_t *error) {
    tms_error_context_t here = *context;
    if (failure->device != TMS_NO_DEVICE) here.device = failure->device;
    if (failure->os_error == EWOULDBLOCK) {
        tms_error_set(error, TMS_DEVICE_LOCKED, &here, "waited %.3f seconds for '%s'%s", wait ? tms_wait_elapsed(wait) : 0.0,
                      failure->path,
                      failure->replaced ? ". It has replaced the lock file that this process holds, because that file was "
                                          "removed: do not remove lock files"
                                        : "");
        describe_process(&failure->holder, "held", error);
        describe_process(&failure->earlier, "waited for", error);
        if (failure->queued) tms_error_append(error, " Requests are served in the order in which they came.");
        tms_error_append(error,
                         " Wait longer with timeout=, or let the other process pause its exclusive memory, or end it.");
        return TMS_DEVICE_LOCKED;
    }
    tms_status_t status = failure->os_error == ENOMEM ? TMS_OUT_OF_HOST_MEMORY : TMS_INVALID_STATE;
    tms_error_set(error, status, &here, "the lock '%s' cannot be used: %s failed with errno %d (%s). %s", failure->path,
                  failure->call, failure->os_error, TMS_OS_TEXT(failure->os_error),
                  failure->path[0] == '/' ? "TMS_LOCK_DIR chooses another directory"
                                          : "Set TMS_LOCK_DIR to an absolute path");
    if (error) {
        error->os_error = failure->os_error;
        snprintf(error->call, sizeof(error->call), "%s", failure->call);
    }
    return status;
}

static void leave(tms_device_locks_t *locks, tms_ticket_t *ticket) {
    pthread_mutex_lock(&locks->mutex);
    tms_device_queue_leave(&locks->queue, locks->directory, ticket);
    pthread_mutex_unlock(&locks->mutex);
}

tms_status_t tms_device_locks_acquire(tms_device_locks_t *locks, tms_device_mask_t devices, tms_wait_t *wait,
                                      const tms_error_context_t *context, tms_error_t *error) {
    wanted_t wanted[TMS_MAX_DEVICES];
    tms_lock_failure_t failure;
    unwritten_t unwritten = {.os_error = 0};
    tms_ticket_t ticket = {.fd = NOT_OPEN};
    int count = 0;
    if (!devices) return TMS_OK;
    tms_status_t status = list_devices(locks, devices, wanted, &count, context, error);
    double delay = first_delay_seconds;
    while (status == TMS_OK) {
        bool may_wait = wait && tms_wait_remaining(wait) > 0;
        if (attempt(locks, wanted, count, may_wait, &ticket, &unwritten, &failure)) break;
        if (failure.os_error == EWOULDBLOCK && may_wait) {
            status = tms_wait_sleep(wait, delay, context, error);
            double max_delay = failure.queued ? max_delay_seconds : max_delay_in_front_seconds;
            delay = delay * 2 < max_delay ? delay * 2 : max_delay;
            continue;
        }
        if (failure.queued && failure.os_error == EWOULDBLOCK) find_holder(locks, wanted, count, &failure);
        status = report(&failure, wait, context, error);
    }
    leave(locks, &ticket);
    if (unwritten.os_error != 0)
        tms_log_write(locks->devices->driver->log, TMS_LOG_WARNING,
                      "%s: the id of this process could not be written to the lock file '%s': %s failed with errno %d. The "
                      "device is locked, but the messages of other processes cannot name this one.",
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
