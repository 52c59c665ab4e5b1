#include "device_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    DIRECTORY_MODE = 0700,
    FILE_MODE = 0600,
    NAME_BYTES = 80,       /* "torch_memory_saver-GPU-<uuid>.lock" and its NUL */
    REPLACED_ATTEMPTS = 8, /* a file that is removed each time it has been locked is not going to stay */
    NOT_OPEN = -1
};

static const double first_pause_seconds = 0.001, longest_pause_seconds = 0.1;

/* A device to be locked. */
typedef struct wanted {
    int device;
    CUuuid uuid;
} wanted_t;

/* What went wrong with a file, and with which. */
typedef struct failure {
    const char *call;
    int os_error; /* EWOULDBLOCK: another process holds it */
    int device;
    char path[PATH_MAX];
} failure_t;

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
    (void)pthread_mutex_init(&locks->mutex, NULL); /* the same memory served before */
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        /* Closed, and not unlocked, which would take the lock away from the parent. */
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

/* Writes the path of the directory, without slashes at its end: behind a slash a link would be followed. */
static bool write_directory_path(const tms_device_locks_t *locks, failure_t *failure) {
    bool configured = locks->directory && locks->directory[0];
    int length =
        configured ? snprintf(failure->path, sizeof(failure->path), "%s", locks->directory)
                   : snprintf(failure->path, sizeof(failure->path), "/tmp/torch_memory_saver-%lu", (unsigned long)geteuid());
    if (length < 0 || (size_t)length >= sizeof(failure->path)) return false;
    while (length > 1 && failure->path[length - 1] == '/') failure->path[--length] = '\0';
    return true;
}

static bool make_directory(const tms_device_locks_t *locks, failure_t *failure) {
    if (!write_directory_path(locks, failure)) return fail(failure, "open", ENAMETOOLONG);
    /* A relative path is another directory for a process with another working directory. */
    if (failure->path[0] != '/') return fail(failure, "open of a path that is not absolute", EINVAL);
    if (mkdir(failure->path, DIRECTORY_MODE) != 0 && errno != EEXIST) return fail(failure, "mkdir", errno);
    return true;
}

static bool check_directory(int fd, failure_t *failure) {
    struct stat found;
    if (fd < 0) return fail(failure, "open", errno);
    if (fstat(fd, &found) != 0) return fail(failure, "fstat", errno);
    if (found.st_uid != geteuid()) return fail(failure, "the check that it is this user's", EPERM);
    return true;
}

/* The directory, made if need be: its descriptor, or NOT_OPEN and the failure. */
static int open_directory(const tms_device_locks_t *locks, failure_t *failure) {
    if (!make_directory(locks, failure)) return NOT_OPEN;
    int fd = open(failure->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (check_directory(fd, failure)) return fd;
    if (fd >= 0) close(fd);
    return NOT_OPEN;
}

static int try_flock(int fd) {
    int result;
    do {
        result = flock(fd, LOCK_EX | LOCK_NB);
    } while (result != 0 && errno == EINTR);
    return result;
}

/* Locks an open file. `named` says whether it still has a name afterwards. */
static bool lock_file(int fd, bool *named, failure_t *failure) {
    struct stat found;
    if (fstat(fd, &found) != 0) return fail(failure, "fstat", errno);
    if (!S_ISREG(found.st_mode) || found.st_uid != geteuid())
        return fail(failure, "the check that it is a regular file of this user's", EPERM);
    if (try_flock(fd) != 0) return fail(failure, "flock", errno);
    if (fstat(fd, &found) != 0) return fail(failure, "fstat", errno);
    *named = found.st_nlink > 0;
    return true;
}

/* Opens the file of that name and locks it: its descriptor, or NOT_OPEN and the failure. */
static int open_locked(int directory, const char *name, failure_t *failure) {
    bool locked = true, named = false;
    for (int attempt = 0; locked && attempt < REPLACED_ATTEMPTS; attempt++) {
        /* O_NONBLOCK: opening a FIFO must not wait for its other end. */
        int fd = openat(directory, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, FILE_MODE);
        locked = fd >= 0 ? lock_file(fd, &named, failure) : fail(failure, "openat", errno);
        if (locked && named) return fd;
        if (fd >= 0) close(fd);
    }
    /* Somebody tidied up between open and flock: the lock on a file without a name keeps nobody away. */
    if (locked) fail(failure, "flock of a file that is removed again and again", ESTALE);
    return NOT_OPEN;
}

static void write_name(char name[NAME_BYTES], const CUuuid *uuid) {
    /* As nvidia-smi writes it: a dash before the bytes 4, 6, 8 and 10. */
    static const unsigned dashes = 1u << 4 | 1u << 6 | 1u << 8 | 1u << 10;
    int used = snprintf(name, NAME_BYTES, "torch_memory_saver-GPU-");
    for (unsigned i = 0; i < sizeof(uuid->bytes); i++) {
        used += snprintf(name + used, (size_t)(NAME_BYTES - used), "%s%02x", dashes >> i & 1 ? "-" : "",
                         (unsigned)(unsigned char)uuid->bytes[i]);
    }
    snprintf(name + used, (size_t)(NAME_BYTES - used), ".lock");
}

/* ---- counts; all under the mutex ---- */

static void unlock(tms_device_lock_t *lock) {
    /* Unlocked first: closing alone would leave the lock with a child that is between fork and exec. */
    (void)flock(lock->fd, LOCK_UN);
    close(lock->fd);
    lock->fd = NOT_OPEN;
}

static void release_one(tms_device_lock_t *lock) {
    if (lock->count > 0 && --lock->count == 0) unlock(lock);
}

static bool acquire_one(tms_device_lock_t *lock, const wanted_t *wanted, int directory, failure_t *failure) {
    char name[NAME_BYTES];
    if (lock->count == 0) {
        write_name(name, &wanted->uuid);
        failure->device = wanted->device;
        lock->fd = open_locked(directory, name, failure);
        if (lock->fd == NOT_OPEN) {
            size_t length = strlen(failure->path);
            snprintf(failure->path + length, sizeof(failure->path) - length, "/%s", name);
            return false;
        }
    }
    lock->count++;
    return true;
}

static bool holds_all(const tms_device_locks_t *locks, const wanted_t *wanted, int count) {
    for (int i = 0; i < count; i++) {
        if (locks->device[wanted[i].device].count == 0) return false;
    }
    return true;
}

/* One count more for all, or for none. */
static bool try_all(tms_device_locks_t *locks, const wanted_t *wanted, int count, failure_t *failure) {
    failure->device = TMS_NO_DEVICE;
    failure->os_error = 0;
    pthread_mutex_lock(&locks->mutex);
    bool needs_files = !holds_all(locks, wanted, count);
    int directory = needs_files ? open_directory(locks, failure) : NOT_OPEN, held = 0;
    if (!needs_files || directory != NOT_OPEN) {
        while (held < count && acquire_one(&locks->device[wanted[held].device], &wanted[held], directory, failure)) held++;
    }
    if (directory != NOT_OPEN) close(directory);
    if (held < count) {
        for (int i = 0; i < held; i++) release_one(&locks->device[wanted[i].device]);
    }
    pthread_mutex_unlock(&locks->mutex);
    return held == count;
}

/* ---- acquire and release ---- */

/* The devices of the mask with their UUIDs, in order of these. */
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
            status = tms_error_set(error, TMS_DRIVER_UNAVAILABLE, &here,
                                   "the driver gives this device and device %d the same UUID, so they have no lock each",
                                   wanted[place - 1].device);
        }
        wanted[place] = one;
    }
    if (status == TMS_OK) *count = found;
    return status;
}

static tms_status_t report(const failure_t *failure, const tms_wait_t *wait, const tms_error_context_t *context,
                           tms_error_t *error) {
    char reason[TMS_ERROR_NAME_BYTES];
    tms_error_context_t here = *context;
    if (failure->device != TMS_NO_DEVICE) here.device = failure->device;
    if (failure->os_error == EWOULDBLOCK)
        return tms_error_set(error, TMS_DEVICE_LOCKED, &here, "waited %.3f seconds for '%s'",
                             wait ? tms_wait_elapsed(wait) : 0.0, failure->path);
    tms_status_t status = failure->os_error == ENOMEM ? TMS_OUT_OF_HOST_MEMORY : TMS_INVALID_STATE;
    tms_error_set(error, status, &here, "the lock '%s' cannot be used: %s failed with errno %d (%s). See TMS_LOCK_DIR",
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
    int count = 0;
    if (!devices) return TMS_OK;
    tms_status_t status = list_devices(locks, devices, wanted, &count, context, error);
    double pause = first_pause_seconds;
    while (status == TMS_OK && !try_all(locks, wanted, count, &failure)) {
        bool held = failure.os_error == EWOULDBLOCK;
        if (!held || !wait || tms_wait_remaining(wait) <= 0) return report(&failure, wait, context, error);
        status = tms_wait_sleep(wait, pause, context, error);
        pause = pause * 2 < longest_pause_seconds ? pause * 2 : longest_pause_seconds;
    }
    return status;
}

void tms_device_locks_retain(tms_device_locks_t *locks, int device) {
    pthread_mutex_lock(&locks->mutex);
    if (locks->device[device].count > 0) locks->device[device].count++;
    pthread_mutex_unlock(&locks->mutex);
}

void tms_device_locks_release(tms_device_locks_t *locks, tms_device_mask_t devices) {
    if (!devices) return;
    pthread_mutex_lock(&locks->mutex);
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        if (devices >> i & 1) release_one(&locks->device[i]);
    }
    pthread_mutex_unlock(&locks->mutex);
}
