#include "base/private_directory.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    DIRECTORY_MODE = 0700,
    OTHERS = 077,       /* permissions that a directory of the package's own must not have */
    OTHERS_WRITE = 022, /* permissions with which others can change a directory */
    NOT_OPEN = -1
};

static bool fail(tms_directory_failure_t *failure, const char *call, int os_error) {
    *failure = (tms_directory_failure_t){.call = call, .os_error = os_error};
    return false;
}

static bool is_sticky_of_root(const struct stat *found) {
    return found->st_uid == 0 && (found->st_mode & S_ISVTX) && (found->st_mode & OTHERS_WRITE);
}

/* Whether the package uses a directory of its own below `path`. */
static bool needs_own(const char *path) {
    struct stat found;
    return stat(path, &found) == 0 && S_ISDIR(found.st_mode) && is_sticky_of_root(&found);
}

/* Writes the path. *own: it is a directory of the package's own. */
static bool choose_path(const tms_directory_choice_t *choice, char path[PATH_MAX], bool *own) {
    bool is_configured = choice->configured && choice->configured[0];
    const char *name = choice->own ? choice->own : "torch_memory_saver";
    int length = snprintf(path, PATH_MAX, "%s", is_configured ? choice->configured : choice->parent);
    if (length < 0 || length >= PATH_MAX) return false;
    while (length > 1 && path[length - 1] == '/') path[--length] = '\0';
    *own = !is_configured || (!choice->exact && needs_own(path));
    if (!*own) return true;
    int added = snprintf(path + length, (size_t)(PATH_MAX - length), "%s%s-%lu", length > 1 ? "/" : "", name,
                         (unsigned long)geteuid());
    return added >= 0 && added < PATH_MAX - length;
}

bool tms_directory_path(const tms_directory_choice_t *choice, char path[PATH_MAX]) {
    bool own;
    return choose_path(choice, path, &own);
}

/* The call texts that say why a directory is not private. */
static const char others_owner[] = "the check that it is this user's or root's";
static const char others_write[] = "the check that no other user can write to it (chmod go-w)";

static bool check(const tms_directory_choice_t *choice, bool own, tms_directory_t *found, tms_directory_failure_t *failure) {
    struct stat now;
    if (fstat(found->fd, &now) != 0) return fail(failure, "fstat", errno);
    found->shared = NULL;
    if (own) {
        if (now.st_uid != geteuid()) return fail(failure, "the check that it is this user's", EPERM);
        if (now.st_mode & OTHERS) return fail(failure, "the check that others cannot use it (chmod go-rwx)", EPERM);
        return true;
    }
    if (choice->exact && is_sticky_of_root(&now)) return true;
    if (now.st_uid != geteuid() && now.st_uid != 0)
        found->shared = others_owner;
    else if (now.st_mode & OTHERS_WRITE)
        found->shared = others_write;
    return true;
}

bool tms_directory_open(const tms_directory_choice_t *choice, tms_directory_t *found, tms_directory_failure_t *failure) {
    bool own;
    found->fd = NOT_OPEN;
    if (!choose_path(choice, found->path, &own)) return fail(failure, "open", ENAMETOOLONG);
    found->fd = tms_path_walk(found->path, &choice->walk, failure);
    if (found->fd < 0) return false;
    if (check(choice, own, found, failure)) return true;
    close(found->fd);
    found->fd = NOT_OPEN;
    return false;
}

tms_directory_choice_t tms_private_directory(const char *configured, const char *parent) {
    return (tms_directory_choice_t){
        .configured = configured, .parent = parent, .walk = {.mode = DIRECTORY_MODE, .no_link = true}};
}

int tms_private_directory_open(const tms_directory_choice_t *choice, char path[PATH_MAX], tms_directory_failure_t *failure) {
    tms_directory_t found;
    bool opened = tms_directory_open(choice, &found, failure);
    memcpy(path, found.path, sizeof(found.path));
    if (!opened) return NOT_OPEN;
    if (!found.shared) return found.fd;
    fail(failure, found.shared, EPERM);
    close(found.fd);
    return NOT_OPEN;
}
