#include "backup/shared/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "backup/shared/files.h"
#include "backup/shared/key.h"
#include "base/private_directory.h"
#include "base/random.h"

enum {
    DIRECTORY_MODE = 0700,
    PATH_BYTES = 64,     /* "holders/.<random>/lock" and its NUL, "/dev/shm/torch_memory_saver-store-<uid>" and its NUL */
    NAME_ATTEMPTS = 100, /* for a holder, which the clean-up of other processes may remove while it is made */
    NOT_OPEN = -1
};

#define OWN     "torch_memory_saver-store" /* not the name for locks and pages, which can have the same parent */
#define OBJECTS "objects"
#define HOLDERS "holders"
#define LOCK    "lock"

static const tms_shared_folder_t closed = {.root = NOT_OPEN, .objects = NOT_OPEN, .holder = NOT_OPEN, .lock = NOT_OPEN};

static void close_file(int fd) {
    if (fd >= 0) close(fd);
}

/* ---- opening ---- */

/* The choice of the folder; `standard` is storage for the path of the usual one, which counts as configured: a directory of
 * the package's own (base/private_directory.h) could not have the mode 0755, with which a user may have made the folder. */
static tms_directory_choice_t choose(const char *configured, char standard[PATH_BYTES]) {
    snprintf(standard, PATH_BYTES, "/dev/shm/" OWN "-%lu", (unsigned long)geteuid());
    tms_directory_choice_t choice = tms_private_directory(configured && configured[0] ? configured : standard, "/dev/shm");
    choice.own = OWN;
    return choice;
}

static tms_status_t fail(const tms_shared_folder_t *folder, const char *call, int os_error, const char *name,
                         const tms_error_context_t *context, tms_error_t *error) {
    return tms_shared_fail(error, context, call, os_error, folder->path, name);
}

static tms_status_t open_root(tms_shared_folder_t *folder, const char *configured, const tms_error_context_t *context,
                              tms_error_t *error) {
    char standard[PATH_BYTES];
    tms_directory_failure_t failure;
    struct statfs system;
    struct stat found;
    const tms_directory_choice_t choice = choose(configured, standard);
    folder->root = tms_private_directory_open(&choice, folder->path, &failure);
    if (folder->root < 0) return fail(folder, failure.call, failure.os_error, NULL, context, error);
    if (fstat(folder->root, &found) != 0) return fail(folder, "fstat", errno, NULL, context, error);
    if (found.st_uid != geteuid()) return fail(folder, "the check that it is this user's", EPERM, NULL, context, error);
    if (fstatfs(folder->root, &system) != 0) return fail(folder, "fstatfs", errno, NULL, context, error);
    if ((uint64_t)system.f_type != TMPFS_MAGIC)
        return tms_error_set(error, TMS_BACKUP_IO, context,
                             "'%s' is not on tmpfs, and the shared store keeps its objects in memory. Set TMS_SHARED_DIR to "
                             "a folder below /dev/shm",
                             folder->path);
    folder->device = found.st_dev;
    folder->number = found.st_ino;
    return TMS_OK;
}

static tms_status_t open_directories(tms_shared_folder_t *folder, const tms_error_context_t *context, tms_error_t *error) {
    static const char *const names[] = {HOLDERS, OBJECTS};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (mkdirat(folder->root, names[i], DIRECTORY_MODE) != 0 && errno != EEXIST)
            return fail(folder, "mkdirat", errno, names[i], context, error);
    }
    folder->objects = tms_shared_open(folder->root, OBJECTS, O_RDONLY | O_DIRECTORY);
    return folder->objects < 0 ? fail(folder, "openat", errno, OBJECTS, context, error) : TMS_OK;
}

/* Opens the new directory `path`, and makes its locked file. Returns NULL, or the name of the failed call with errno set. */
static const char *lock_holder(tms_shared_folder_t *folder, const char *path) {
    folder->holder = tms_shared_open(folder->root, path, O_RDONLY | O_DIRECTORY);
    if (folder->holder < 0) return "openat";
    folder->lock = tms_shared_open(folder->holder, LOCK, O_RDWR | O_CREAT | O_EXCL);
    if (folder->lock < 0) return "openat";
    errno = tms_shared_lock(folder->lock, folder->holder, LOCK);
    return errno == 0 ? NULL : "flock";
}

/* Makes one attempt to make a holder under a new name. Returns NULL, or the name of the failed call with errno set. */
static const char *try_holder(tms_shared_folder_t *folder) {
    char unfinished[PATH_BYTES], path[PATH_BYTES];
    snprintf(folder->holder_name, sizeof(folder->holder_name), "%0*" PRIx64, TMS_SHARED_HOLDER_DIGITS, tms_random_number());
    snprintf(unfinished, sizeof(unfinished), HOLDERS "/.%s", folder->holder_name);
    snprintf(path, sizeof(path), HOLDERS "/%s", folder->holder_name);
    if (mkdirat(folder->root, unfinished, DIRECTORY_MODE) != 0) return "mkdirat";
    const char *failed = lock_holder(folder, unfinished);
    if (!failed && renameat(folder->root, unfinished, folder->root, path) != 0) failed = "renameat";
    if (!failed) return NULL;
    int os_error = errno;
    if (folder->lock >= 0) (void)unlinkat(folder->holder, LOCK, 0);
    (void)unlinkat(folder->root, unfinished, AT_REMOVEDIR);
    close_file(folder->lock);
    close_file(folder->holder);
    folder->lock = folder->holder = NOT_OPEN;
    errno = os_error;
    return failed;
}

static tms_status_t make_holder(tms_shared_folder_t *folder, const tms_error_context_t *context, tms_error_t *error) {
    const char *failed;
    int attempts = 0;
    do failed = try_holder(folder);
    while (failed && (errno == EEXIST || errno == ENOENT || errno == EWOULDBLOCK) && ++attempts < NAME_ATTEMPTS);
    return failed ? fail(folder, failed, errno, HOLDERS, context, error) : TMS_OK;
}

/* Makes the key, or reads the one that another process has made first. */
static tms_status_t make_key(const tms_shared_folder_t *folder, const tms_error_context_t *context, tms_error_t *error) {
    bool found = false;
    tms_status_t status = tms_shared_key_make(folder->root, folder->holder, folder->path, folder->key, context, error);
    if (status == TMS_OK) status = tms_shared_key_read(folder->root, folder->path, folder->key, &found, context, error);
    return status == TMS_OK && !found ? fail(folder, "openat", ENOENT, "key", context, error) : status;
}

tms_status_t tms_shared_folder_open(tms_shared_folder_t *folder, const char *configured, const tms_log_t *log,
                                    const tms_error_context_t *context, tms_error_t *error) {
    bool has_key = false;
    *folder = closed;
    folder->key = calloc(1, sizeof(*folder->key));
    if (!folder->key) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    tms_status_t status = open_root(folder, configured, context, error);
    if (status == TMS_OK) status = tms_shared_key_read(folder->root, folder->path, folder->key, &has_key, context, error);
    if (status == TMS_OK) status = open_directories(folder, context, error);
    if (status == TMS_OK) status = make_holder(folder, context, error);
    if (status == TMS_OK && !has_key) status = make_key(folder, context, error);
    if (status != TMS_OK) tms_shared_folder_close(folder, log);
    return status;
}

bool tms_shared_folder_is_current(const tms_shared_folder_t *folder, const char *configured) {
    char standard[PATH_BYTES], path[PATH_MAX], lock[PATH_BYTES];
    struct stat found;
    const tms_directory_choice_t choice = choose(configured, standard);
    if (folder->root < 0 || !tms_directory_path(&choice, path) || lstat(path, &found) != 0) return false;
    snprintf(lock, sizeof(lock), HOLDERS "/%s/" LOCK, folder->holder_name);
    return found.st_dev == folder->device && found.st_ino == folder->number &&
           tms_shared_is_named(folder->objects, folder->root, OBJECTS) &&
           tms_shared_is_named(folder->lock, folder->root, lock);
}

/* ---- removal ---- */

/* Removes a directory of a holder (published.h). Returns false, with errno set, if something is still there. */
static bool remove_publication(const tms_shared_folder_t *folder, int holder, const char *name) {
    int directory = tms_shared_open(holder, name, O_RDONLY | O_DIRECTORY);
    if (directory < 0) return errno == ENOENT;
    bool removed = tms_shared_remove_directory(directory, folder->objects, holder, name);
    int os_error = errno;
    close(directory);
    errno = os_error;
    return removed;
}

/* Removes a link of a holder, or a directory that a publisher has left (published.h). Returns false, with errno set, if it
 * is still there. */
static bool remove_entry(const tms_shared_folder_t *folder, int holder, const char *name) {
    if (tms_shared_remove_link(holder, folder->objects, name)) return true;
    return errno == EISDIR && remove_publication(folder, holder, name);
}

/* Removes all entries of an open holder but its lock. Returns false, with errno set, if something is still there. */
static bool remove_links(const tms_shared_folder_t *folder, int holder) {
    int os_error = 0;
    DIR *list = tms_shared_list(holder);
    if (!list) return false;
    for (const char *name; (name = tms_shared_next(list));) {
        if (strcmp(name, LOCK) != 0 && !remove_entry(folder, holder, name)) os_error = errno;
    }
    closedir(list);
    errno = os_error;
    return os_error == 0;
}

/* Removes the directory of a holder. It has gone as well if another process has removed it. */
static bool remove_directory(const tms_shared_folder_t *folder, const char *name) {
    char path[PATH_MAX];
    snprintf(path, sizeof(path), HOLDERS "/%s", name);
    return unlinkat(folder->root, path, AT_REMOVEDIR) == 0 || errno == ENOENT;
}

/* Removes a holder whose lock this process has, or which has lost its lock. The lock goes last, so that an interrupted
 * removal is made again. */
static void remove_holder(const tms_shared_folder_t *folder, int holder, const char *name, const tms_log_t *log) {
    if (remove_links(folder, holder) && (unlinkat(holder, LOCK, 0) == 0 || errno == ENOENT) &&
        remove_directory(folder, name))
        return;
    tms_log_write(log, TMS_LOG_WARNING, "'%s/" HOLDERS "/%s' of the shared store was not removed (%s)", folder->path, name,
                  TMS_OS_TEXT(errno));
}

/* Removes a holder if its process is dead. Returns whether it is. */
static bool remove_if_dead(const tms_shared_folder_t *folder, int holder, const char *name, const tms_log_t *log) {
    int lock = tms_shared_open(holder, LOCK, O_RDWR);
    if (lock < 0 && errno == ENOENT) {
        /* The lock is the first file of a holder. If it is missing, the directory is empty, or a user has removed the lock.
         * A process that is just making this holder makes another one. */
        if (remove_directory(folder, name)) return true;
        lock = tms_shared_open(holder, LOCK, O_RDWR);
        if (lock < 0 && errno == ENOENT) {
            remove_holder(folder, holder, name, log);
            return true;
        }
    }
    bool dead = lock >= 0 && tms_shared_lock(lock, holder, LOCK) == 0;
    if (dead) remove_holder(folder, holder, name, log);
    close_file(lock);
    return dead;
}

/* Returns whether there was one. */
static bool remove_dead_holders(const tms_shared_folder_t *folder, const tms_log_t *log) {
    bool found = false;
    int holders = tms_shared_open(folder->root, HOLDERS, O_RDONLY | O_DIRECTORY);
    DIR *list = holders < 0 ? NULL : tms_shared_list(holders);
    for (const char *name; list && (name = tms_shared_next(list));) {
        int holder =
            strcmp(name, folder->holder_name) == 0 ? NOT_OPEN : tms_shared_open(holders, name, O_RDONLY | O_DIRECTORY);
        if (holder >= 0 && remove_if_dead(folder, holder, name, log)) found = true;
        close_file(holder);
    }
    if (list) closedir(list);
    close_file(holders);
    return found;
}

static bool is_part(const char *name) {
    size_t length = strlen(name), end = strlen(TMS_SHARED_PART);
    return length > end && strcmp(name + length - end, TMS_SHARED_PART) == 0;
}

/* Removes an unfinished object unless a process writes it. */
static void remove_part(const tms_shared_folder_t *folder, const char *name) {
    int fd = tms_shared_open(folder->objects, name, O_RDONLY);
    if (fd >= 0 && tms_shared_lock(fd, folder->objects, name) == 0) (void)unlinkat(folder->objects, name, 0);
    close_file(fd);
}

/* Removes the objects of a list that nothing links. Returns false, with errno set, if one is still there. */
static bool remove_unlinked(const tms_shared_folder_t *folder, DIR *list) {
    int os_error = 0;
    for (const char *name; (name = tms_shared_next(list));) {
        if (!is_part(name) && !tms_shared_remove_unlinked(folder->objects, name)) os_error = errno;
    }
    errno = os_error;
    return os_error == 0;
}

/* Removes the objects that dead processes have left. */
static void remove_dead_objects(const tms_shared_folder_t *folder, DIR *list, const tms_log_t *log) {
    /* Unfinished files go first. A process that was killed just before its object was finished has left two names. */
    for (const char *name; (name = tms_shared_next(list));) {
        if (is_part(name)) remove_part(folder, name);
    }
    rewinddir(list);
    if (!remove_unlinked(folder, list))
        tms_log_write(log, TMS_LOG_WARNING, "an object of dead processes in '%s/" OBJECTS "' was not removed (%s)",
                      folder->path, TMS_OS_TEXT(errno));
}

/* Removes the published names without a manifest: a process that removed them has died, or is not done yet. */
static void remove_unnamed(const tms_shared_folder_t *folder) {
    struct stat found;
    int names = tms_shared_open(folder->root, TMS_SHARED_NAMES, O_RDONLY | O_DIRECTORY);
    DIR *list = names < 0 ? NULL : tms_shared_list(names);
    for (const char *name; list && (name = tms_shared_next(list));) {
        int directory = tms_shared_open(names, name, O_RDONLY | O_DIRECTORY);
        if (directory >= 0 && fstatat(directory, TMS_SHARED_MANIFEST, &found, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT)
            (void)tms_shared_remove_directory(directory, folder->objects, names, name);
        close_file(directory);
    }
    if (list) closedir(list);
    close_file(names);
}

void tms_shared_folder_clean(const tms_shared_folder_t *folder, const tms_log_t *log) {
    /* The objects are listed first. Without a dead holder, no later clean-up would look for the objects that it has left. */
    DIR *list = tms_shared_list(folder->objects);
    if (!list) {
        tms_log_write(log, TMS_LOG_WARNING, "the shared store '%s' was not cleaned up: it cannot be listed (%s)",
                      folder->path, TMS_OS_TEXT(errno));
        return;
    }
    remove_unnamed(folder);
    if (remove_dead_holders(folder, log)) {
        tms_log_write(log, TMS_LOG_INFO, "removing what dead processes left in the shared store '%s'", folder->path);
        remove_dead_objects(folder, list, log);
    }
    closedir(list);
}

bool tms_shared_folder_sweep(const tms_shared_folder_t *folder, bool (*kept)(const void *context, const char *name),
                             const void *context) {
    DIR *links = tms_shared_list(folder->holder), *objects = tms_shared_list(folder->objects);
    bool removed = links && objects;
    for (const char *name; links && (name = tms_shared_next(links));) {
        if (strcmp(name, LOCK) != 0 && !kept(context, name)) removed &= remove_entry(folder, folder->holder, name);
    }
    if (objects) removed &= remove_unlinked(folder, objects);
    if (links) closedir(links);
    if (objects) closedir(objects);
    return removed;
}

void tms_shared_folder_leave(const tms_shared_folder_t *folder, const tms_log_t *log) {
    if (folder->root >= 0 && folder->lock >= 0) remove_holder(folder, folder->holder, folder->holder_name, log);
}

void tms_shared_folder_close(tms_shared_folder_t *folder, const tms_log_t *log) {
    tms_shared_folder_leave(folder, log);
    tms_shared_folder_after_fork_in_child(folder);
}

void tms_shared_folder_after_fork_in_child(tms_shared_folder_t *folder) {
    const int descriptors[] = {folder->lock, folder->holder, folder->objects, folder->root};
    for (size_t i = 0; folder->root >= 0 && i < sizeof(descriptors) / sizeof(descriptors[0]); i++)
        close_file(descriptors[i]);
    free(folder->key);
    *folder = closed;
}
