/* Files of the shared store's folder, addressed relative to descriptors of directories.
 *
 * No link is followed, every descriptor is closed on exec, and interrupted calls are made again. A lock is one of flock. Its
 * holder compares the file that it has locked with the file of that name, because another process may have removed the name
 * between open and flock.
 *
 * A function that returns a text returns NULL, or the name of the failed call with errno set. Any thread; no lock, no
 * state. */
#ifndef TMS_SHARED_FILES_H
#define TMS_SHARED_FILES_H

#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define TMS_SHARED_PART ".part" /* ends the name of an object that is not finished */

/* Opens a name, and does not wait for the other end of a FIFO. A created file has mode 0600. Returns -1 with errno set on
 * failure. */
int tms_shared_open(int directory, const char *name, int flags);
/* Lists a directory. NULL with errno set on failure. */
DIR *tms_shared_list(int directory);
/* Returns the next name of a list other than "." and "..", or NULL. */
const char *tms_shared_next(DIR *list);
/* Whether `name` is a name of the open file. */
bool tms_shared_is_named(int fd, int directory, const char *name);
/* Locks an open file that has this name. Returns 0; ENOENT if the name is gone, or an errno of flock: EWOULDBLOCK if another
 * process has the lock. */
int tms_shared_lock(int fd, int directory, const char *name);
/* Writes all bytes at `offset`. A size beyond RLIMIT_FSIZE is EFBIG, without SIGXFSZ. */
const char *tms_shared_write(int fd, const void *data, uint64_t bytes, uint64_t offset);
/* Reads bytes from `offset` on, and returns their number, which is lower at the end of the file, or -1 with errno set. */
int64_t tms_shared_read(int fd, void *data, uint64_t bytes, uint64_t offset);

/* Removes an object that has no link. If another process links it at the same time, that process keeps the bytes, and the
 * object loses its name. Returns false, with errno set, if it has no link and is still there. */
bool tms_shared_remove_unlinked(int objects, const char *name);
/* Removes a link to an object, and the object if that was the last one. Returns false, with errno set, if the link is still
 * there, or the object although that was its last link. */
bool tms_shared_remove_link(int holder, int objects, const char *name);

/* Removes the files of an open directory, the objects that only it linked, and its name in `parent`. The name stays if it
 * is that of another directory now, which is not empty. Returns false, with errno set, if something is still there. */
bool tms_shared_remove_directory(int directory, int objects, int parent, const char *name);

/* Fills *error for a call that failed on a file of the folder `path`, or on the folder itself if `name` is NULL. A full
 * folder and RLIMIT_FSIZE are explained. */
tms_status_t tms_shared_fail(tms_error_t *error, const tms_error_context_t *context, const char *call, int os_error,
                             const char *path, const char *name);

#endif
