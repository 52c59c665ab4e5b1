/* The directories in which the package keeps files: the one rule that says which of them are used.
 *
 * - A directory is *private* if it belongs to this user or to root, and no other user can write to it.
 * - In a sticky directory of root that others can write to, such as /tmp, the package uses the directory
 *   torch_memory_saver-<uid>, or `own`-<uid>, which must belong to this user and be closed to others. It is made with mode
 *   0700.
 * - Any other directory is *shared*: its owner or others can remove, replace and add files.
 *
 * Locks, shared pages and libraries need a private directory. Other files may lie in a shared one, because they are made
 * under new random names, relative to the descriptor of the directory. Paths are walked by path_walk.h. Owns nothing; any
 * thread, no lock. */
#ifndef TMS_PRIVATE_DIRECTORY_H
#define TMS_PRIVATE_DIRECTORY_H

#include <limits.h>

#include "base/path_walk.h"

typedef struct tms_directory_choice {
    const char *configured; /* the configured path; NULL or "" selects the package's own directory below `parent` */
    const char *parent;
    const char *own; /* names the package's own directory, without -<uid>; NULL: torch_memory_saver */
    bool exact;      /* a sticky directory is used itself, because the caller's files have given paths. It is not shared. */
    tms_path_walk_t walk;
} tms_directory_choice_t;

typedef struct tms_directory {
    int fd;             /* O_PATH; -1: not open */
    const char *shared; /* why the directory is shared, as the end of a sentence about it; NULL: it is private */
    char path[PATH_MAX];
} tms_directory_t;

/* Writes the path, without trailing slashes. False if it is too long. Creates nothing. */
bool tms_directory_path(const tms_directory_choice_t *choice, char path[PATH_MAX]);
/* Opens the directory. False, with *failure and the path that it concerns, if that fails. */
bool tms_directory_open(const tms_directory_choice_t *choice, tms_directory_t *found, tms_directory_failure_t *failure);
/* Returns the choice for files that need a private directory, which is no link. Only the last directory of its path is
 * made. */
tms_directory_choice_t tms_private_directory(const char *configured, const char *parent);
/* Opens the directory, which must be private. Returns a descriptor and writes the path, or returns -1 and fills *failure. */
int tms_private_directory_open(const tms_directory_choice_t *choice, char path[PATH_MAX], tms_directory_failure_t *failure);

#endif
