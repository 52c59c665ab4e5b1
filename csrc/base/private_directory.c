#include "base/private_directory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    DIRECTORY_MODE = 0700,
    OTHERS = 077, /* permissions that the default directory must not have */
    NOT_OPEN = -1
};

static bool fail(tms_private_directory_failure_t *failure, const char *call, int os_error) {
    *failure = (tms_private_directory_failure_t){.call = call, .os_error = os_error};
    return false;
}

static bool is_configured(const tms_private_directory_t *directory) {
    return directory->configured && directory->configured[0];
}

bool tms_private_directory_path(const tms_private_directory_t *directory, char path[PATH_MAX]) {
    int length = is_configured(directory)
                     ? snprintf(path, PATH_MAX, "%s", directory->configured)
                     : snprintf(path, PATH_MAX, "%s/torch_memory_saver-%lu", directory->parent, (unsigned long)geteuid());
    if (length < 0 || length >= PATH_MAX) return false;
    /* With a trailing slash, open would follow a symbolic link. */
    while (length > 1 && path[length - 1] == '/') path[--length] = '\0';
    return true;
}

static bool make(const tms_private_directory_t *directory, char path[PATH_MAX], tms_private_directory_failure_t *failure) {
    if (!tms_private_directory_path(directory, path)) return fail(failure, "open", ENAMETOOLONG);
    /* A relative path names a different directory in a process with a different working directory. */
    if (path[0] != '/') return fail(failure, "open of a path that is not absolute", EINVAL);
    if (mkdir(path, DIRECTORY_MODE) != 0 && errno != EEXIST) return fail(failure, "mkdir", errno);
    return true;
}

static bool check(const tms_private_directory_t *directory, int fd, tms_private_directory_failure_t *failure) {
    struct stat found;
    if (fd < 0) return fail(failure, "open", errno);
    if (fstat(fd, &found) != 0) return fail(failure, "fstat", errno);
    if (found.st_uid != geteuid()) return fail(failure, "the check that it is this user's", EPERM);
    if (!is_configured(directory) && (found.st_mode & OTHERS))
        return fail(failure, "the check that others cannot use it", EPERM);
    return true;
}

int tms_private_directory_open(const tms_private_directory_t *directory, char path[PATH_MAX],
                               tms_private_directory_failure_t *failure) {
    if (!make(directory, path, failure)) return NOT_OPEN;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (check(directory, fd, failure)) return fd;
    if (fd >= 0) close(fd);
    return NOT_OPEN;
}
