/* The folder of the shared store, its key, and the holder of this process (docs/architecture-shared-store.md).
 *
 * The folder must belong to this user, be private (base/private_directory.h), no link, and on tmpfs; else it is refused by
 * name. So is a folder whose key is not usable (key.h).
 *
 * The holder is a directory with a lock file, which this process keeps locked with flock, and hard links to objects. It is
 * made under a name that begins with ".", locked, and renamed. The lock opens when the process ends, in any way. A process
 * that takes the lock of a holder compares the file that it has with the one of that name (device and inode), because
 * another process may have removed the holder in between. A process whose holder was removed while it was made makes another
 * one.
 *
 * A process that is killed at any point leaves nothing that tms_shared_folder_clean of another process does not remove. A
 * holder without a lock file, an unfinished key and an unfinished holder count as well.
 *
 * All files are addressed relative to descriptors, which are closed on exec. Makes no driver call. The caller has the
 * store's lock, or is the only user. */
#ifndef TMS_SHARED_FOLDER_H
#define TMS_SHARED_FOLDER_H

#include <limits.h>
#include <stdbool.h>
#include <sys/types.h>

#include "backup/shared/names.h"
#include "base/log.h"
#include "base/status.h"

enum { TMS_SHARED_HOLDER_DIGITS = 16 };

#define TMS_SHARED_NAMES    "names"         /* the directory of published names (published.h) */
#define TMS_SHARED_MANIFEST "manifest.json" /* a file of each of them, which the process that removes it removes first */

/* `root` -1: not open, and the other descriptors mean nothing. */
typedef struct tms_shared_folder {
    int root, objects; /* descriptors of the folder and of its `objects` */
    int holder, lock;  /* descriptors of the holder and of its locked file */
    dev_t device;      /* with `number`: which folder `root` is */
    ino_t number;
    char holder_name[TMS_SHARED_HOLDER_DIGITS + 1];
    tms_shared_key_t *key; /* on the heap */
    char path[PATH_MAX];   /* for messages */
} tms_shared_folder_t;

/* Opens the folder, which is made if it is missing, reads or makes its key, and makes a holder. `configured` is the value of
 * TMS_SHARED_DIR, or NULL. TMS_BACKUP_IO, TMS_OUT_OF_HOST_MEMORY. After a failure nothing is open, and nothing that this
 * call has made in the folder is left but an empty folder or its key. */
tms_status_t tms_shared_folder_open(tms_shared_folder_t *folder, const char *configured, const tms_log_t *log,
                                    const tms_error_context_t *context, tms_error_t *error);
/* Whether the path still names the folder that is open, and the holder is still in it. */
bool tms_shared_folder_is_current(const tms_shared_folder_t *folder, const char *configured);
/* Removes what dead processes have left: their holders, published names without a manifest, and, if there was a holder,
 * unfinished objects whose lock can be taken and objects that no holder and no published name links. A failure to remove
 * something is logged. */
void tms_shared_folder_clean(const tms_shared_folder_t *folder, const tms_log_t *log);
/* After an unlink has failed: removes the links of this process's holder whose names are not `kept`, the directories of
 * publications, of which none may be under way, and the objects that nothing links. Returns whether all of them are gone. */
bool tms_shared_folder_sweep(const tms_shared_folder_t *folder, bool (*kept)(const void *context, const char *name),
                             const void *context);
/* At exit: removes the holder with its links, and the objects that have no other link. The descriptors and the key stay,
 * because another thread may use them. Accepts a folder that is not open. */
void tms_shared_folder_leave(const tms_shared_folder_t *folder, const tms_log_t *log);
/* Leaves the folder, closes the descriptors, and forgets the key. Accepts a folder that is not open. */
void tms_shared_folder_close(tms_shared_folder_t *folder, const tms_log_t *log);
/* In a forked child: closes the descriptors without unlocking, and forgets the folder. A child that kept the lock's
 * descriptor would keep the holder of a dead parent alive. */
void tms_shared_folder_after_fork_in_child(tms_shared_folder_t *folder);

#endif
