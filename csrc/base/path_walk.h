/* Opens a directory by its absolute path, component by component, and files in an open directory.
 *
 * A symbolic link in the path is followed only if it belongs to this user or to root: its owner could let the path lead to
 * any other directory at any time. Later changes of the path do not affect the descriptor. Owns nothing; any thread, no
 * lock. */
#ifndef TMS_PATH_WALK_H
#define TMS_PATH_WALK_H

#include <stdbool.h>
#include <sys/types.h>

/* The call that failed, and its errno. */
typedef struct tms_directory_failure {
    const char *call;
    int os_error;
} tms_directory_failure_t;

typedef struct tms_path_walk {
    mode_t mode;  /* permissions of missing directories, which are made; the umask takes some; 0: none is made */
    bool parents; /* whether a missing directory above the last one is made too */
    bool no_link; /* whether the last component must not be a link at all */
} tms_path_walk_t;

/* openat with O_CLOEXEC, which may wait on network file systems and is called again if a signal interrupts it. */
int tms_open_at(int directory, const char *name, int flags, mode_t mode);

/* Returns a descriptor (O_PATH) of the directory, or -1 with *failure. */
int tms_path_walk(const char *path, const tms_path_walk_t *how, tms_directory_failure_t *failure);

#endif
