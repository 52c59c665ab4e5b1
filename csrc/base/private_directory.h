/* A directory of this user for files that others must not touch: lock files, shared pages.
 *
 * One rule for all of them: the path that a variable names, else torch_memory_saver-<uid> below a directory of the system.
 * It is created with mode 0700 if it is missing. It must be absolute, a real directory (no link), and this user's; the
 * default one must also be inaccessible to others. Owns nothing; any thread, no lock. */
#ifndef TMS_PRIVATE_DIRECTORY_H
#define TMS_PRIVATE_DIRECTORY_H

#include <limits.h>
#include <stdbool.h>

typedef struct tms_private_directory {
    const char *configured; /* the configured path; NULL or "" selects the default below `parent` */
    const char *parent;
} tms_private_directory_t;

/* The call that failed, and its errno. */
typedef struct tms_private_directory_failure {
    const char *call;
    int os_error;
} tms_private_directory_failure_t;

/* Writes the path, without trailing slashes. False if it is too long. Creates nothing. */
bool tms_private_directory_path(const tms_private_directory_t *directory, char path[PATH_MAX]);
/* Opens the directory, which is created if missing, and writes the path. Returns -1 and fills *failure if that fails. */
int tms_private_directory_open(const tms_private_directory_t *directory, char path[PATH_MAX],
                               tms_private_directory_failure_t *failure);

#endif
