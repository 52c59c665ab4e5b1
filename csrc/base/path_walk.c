#include "base/path_walk.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MAX_LINKS = 40, /* as in the kernel */
    NOT_OPEN = -1
};

/* The part of a path that has not been walked yet. */
typedef struct rest {
    char text[PATH_MAX];
    int links; /* number of links that have been followed */
} rest_t;

static int fail(tms_directory_failure_t *failure, const char *call, int os_error) {
    *failure = (tms_directory_failure_t){.call = call, .os_error = os_error};
    return NOT_OPEN;
}

int tms_open_at(int directory, const char *name, int flags, mode_t mode) {
    int fd;
    do fd = openat(directory, name, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static int open_at(int directory, const char *name, int flags) {
    return tms_open_at(directory, name, O_PATH | O_NOFOLLOW | flags, 0);
}

/* Takes the first component off the path. False: none is left. */
static bool take_component(rest_t *rest, char name[NAME_MAX + 1], tms_directory_failure_t *failure) {
    size_t begin = strspn(rest->text, "/"), length = strcspn(rest->text + begin, "/");
    failure->os_error = 0;
    if (length > NAME_MAX) {
        fail(failure, "openat", ENAMETOOLONG);
        return false;
    }
    memcpy(name, rest->text + begin, length);
    name[length] = '\0';
    memmove(rest->text, rest->text + begin + length, strlen(rest->text + begin + length) + 1);
    return length > 0;
}

static bool is_last(const rest_t *rest) { return rest->text[strspn(rest->text, "/")] == '\0'; }

/* Puts the target of an open link before the path. */
static int expand(int link, rest_t *rest, tms_directory_failure_t *failure) {
    char target[PATH_MAX];
    struct stat found;
    if (fstat(link, &found) != 0) return fail(failure, "fstat", errno);
    if (!S_ISLNK(found.st_mode)) return fail(failure, "openat", ENOTDIR);
    if (found.st_uid != geteuid() && found.st_uid != 0)
        return fail(failure, "the check for a symbolic link of another user in its path", EPERM);
    if (++rest->links > MAX_LINKS) return fail(failure, "openat", ELOOP);
    ssize_t length = readlinkat(link, "", target, sizeof(target));
    if (length < 0) return fail(failure, "readlinkat", errno);
    size_t left = strlen(rest->text);
    if ((size_t)length + 1 + left >= sizeof(rest->text)) return fail(failure, "openat", ENAMETOOLONG);
    memmove(rest->text + length + 1, rest->text, left + 1);
    memcpy(rest->text, target, (size_t)length);
    rest->text[length] = '/';
    return 0;
}

/* Opens a link and puts its target before the path. Returns the directory in which to go on, or NOT_OPEN. */
static int follow(int directory, const char *name, rest_t *rest, tms_directory_failure_t *failure) {
    int link = open_at(directory, name, 0);
    if (link < 0) return fail(failure, "openat", errno);
    int next = expand(link, rest, failure);
    close(link);
    if (next == NOT_OPEN) return NOT_OPEN;
    next = rest->text[0] == '/' ? open_at(AT_FDCWD, "/", O_DIRECTORY) : open_at(directory, ".", O_DIRECTORY);
    return next < 0 ? fail(failure, "openat", errno) : next;
}

static int enter(int directory, const char *name, rest_t *rest, const tms_path_walk_t *how,
                 tms_directory_failure_t *failure) {
    /* O_DIRECTORY: without it, an automount point is opened and not mounted. */
    int next = open_at(directory, name, O_DIRECTORY);
    if (next < 0 && errno == ENOENT && how->mode) {
        if (!how->parents && !is_last(rest)) return fail(failure, "mkdirat", ENOENT);
        if (mkdirat(directory, name, how->mode) != 0 && errno != EEXIST) return fail(failure, "mkdirat", errno);
        next = open_at(directory, name, O_DIRECTORY);
    }
    if (next >= 0) return next;
    if ((errno != ENOTDIR && errno != ELOOP) || (how->no_link && is_last(rest))) return fail(failure, "openat", errno);
    return follow(directory, name, rest, failure);
}

int tms_path_walk(const char *path, const tms_path_walk_t *how, tms_directory_failure_t *failure) {
    rest_t rest = {.links = 0};
    char name[NAME_MAX + 1];
    /* A relative path names a different directory in a process with a different working directory. */
    if (path[0] != '/') return fail(failure, "the check that its path is absolute", EINVAL);
    if (strlen(path) >= sizeof(rest.text)) return fail(failure, "openat", ENAMETOOLONG);
    memcpy(rest.text, path, strlen(path) + 1);
    int directory = open_at(AT_FDCWD, "/", O_DIRECTORY);
    if (directory < 0) return fail(failure, "openat", errno);
    while (take_component(&rest, name, failure)) {
        int next = enter(directory, name, &rest, how, failure);
        close(directory);
        if (next < 0) return NOT_OPEN;
        directory = next;
    }
    if (failure->os_error == 0) return directory;
    close(directory);
    return NOT_OPEN;
}
