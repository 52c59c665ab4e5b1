#include "backup/shared/files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/path_walk.h"
#include "base/size_limit.h"
#include "device/lock_file.h"

enum { FILE_MODE = 0600 };

int tms_shared_open(int directory, const char *name, int flags) {
    return tms_open_at(directory, name, flags | O_NOFOLLOW | O_NONBLOCK, FILE_MODE);
}

DIR *tms_shared_list(int directory) {
    int fd = tms_shared_open(directory, ".", O_RDONLY | O_DIRECTORY);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (fd >= 0 && !list) {
        int os_error = errno;
        close(fd);
        errno = os_error;
    }
    return list;
}

const char *tms_shared_next(DIR *list) {
    for (const struct dirent *entry; (entry = readdir(list));) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) return entry->d_name;
    }
    return NULL;
}

bool tms_shared_is_named(int fd, int directory, const char *name) {
    struct stat ours, found;
    return fstat(fd, &ours) == 0 && fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
           ours.st_dev == found.st_dev && ours.st_ino == found.st_ino;
}

int tms_shared_lock(int fd, int directory, const char *name) {
    int os_error = tms_lock_file_try(fd);
    if (os_error != 0) return os_error;
    return tms_shared_is_named(fd, directory, name) ? 0 : ENOENT;
}

const char *tms_shared_write(int fd, const void *data, uint64_t bytes, uint64_t offset) {
    errno = tms_size_limit_check(offset + bytes);
    if (errno != 0) return "pwrite";
    for (uint64_t done = 0; done < bytes;) {
        ssize_t written = pwrite(fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (written < 0 && errno == EINTR) continue;
        if (written == 0) errno = ENOSPC;
        if (written <= 0) return "pwrite";
        done += (uint64_t)written;
    }
    return NULL;
}

int64_t tms_shared_read(int fd, void *data, uint64_t bytes, uint64_t offset) {
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t got = pread(fd, (char *)data + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += (uint64_t)got;
    }
    return (int64_t)done;
}

bool tms_shared_remove_unlinked(int objects, const char *name) {
    struct stat found;
    if (fstatat(objects, name, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode) && found.st_nlink == 1)
        return unlinkat(objects, name, 0) == 0 || errno == ENOENT;
    return true;
}

bool tms_shared_remove_link(int holder, int objects, const char *name) {
    if (unlinkat(holder, name, 0) != 0 && errno != ENOENT) return false;
    return tms_shared_remove_unlinked(objects, name);
}

/* Removes the files of an open directory. Returns false, with errno set, if one is still there. */
static bool remove_files(int directory, int objects) {
    int os_error = 0;
    DIR *list = tms_shared_list(directory);
    if (!list) return false;
    for (const char *name; (name = tms_shared_next(list));) {
        if (!tms_shared_remove_link(directory, objects, name)) os_error = errno;
    }
    closedir(list);
    errno = os_error;
    return os_error == 0;
}

bool tms_shared_remove_directory(int directory, int objects, int parent, const char *name) {
    return remove_files(directory, objects) && (unlinkat(parent, name, AT_REMOVEDIR) == 0 || errno == ENOENT);
}

tms_status_t tms_shared_fail(tms_error_t *error, const tms_error_context_t *context, const char *call, int os_error,
                             const char *path, const char *name) {
    char whole[PATH_MAX + NAME_MAX];
    struct stat found;
    snprintf(whole, sizeof(whole), "%s%s%s", path, name ? "/" : "", name ? name : "");
    tms_status_t status = tms_error_set_os(error, context, call, os_error, whole);
    if (os_error == ENOSPC) tms_error_append_free_space(error, path);
    if (os_error == ENOSPC || os_error == EDQUOT)
        tms_error_append(error,
                         " The folder is full, in bytes or in files: set TMS_SHARED_DIR to one on a larger tmpfs. In a "
                         "container, --shm-size sets the size of /dev/shm.");
    else if (path[0] != '/')
        tms_error_append(error, " Set TMS_SHARED_DIR to an absolute path.");
    else if (os_error == ENOENT && strcmp(call, "mkdirat") == 0)
        tms_error_append(error, " Its parent directory does not exist: create it, or set TMS_SHARED_DIR to another folder.");
    else if (!name && (os_error == ENOTDIR || os_error == ELOOP) && lstat(path, &found) == 0 && S_ISLNK(found.st_mode))
        tms_error_append(error, " It is a symbolic link: name the folder itself in TMS_SHARED_DIR.");
    else if (os_error == EFBIG)
        tms_error_append(error, " The limit of this process for the size of a file is too low: RLIMIT_FSIZE (ulimit -f).");
    else if (os_error == EACCES || os_error == EPERM || os_error == EROFS)
        tms_error_append(error, " Check the permissions of the folder, or set TMS_SHARED_DIR to another.");
    else if (!name && status == TMS_BACKUP_IO)
        tms_error_append(error, " Set TMS_SHARED_DIR to another folder.");
    return status;
}
