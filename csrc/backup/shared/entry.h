/* One object in the folder: objects/NAME, or objects/NAME.part while a process writes it.
 *
 * A process holds an object by a link in its holder. A writer has the .part file open and locked with flock. It writes,
 * links the file to its holder and then to objects/NAME, and removes the name .part. So an object that has its name is
 * whole, and has two links at least. If objects/NAME exists by then, the writer's file goes and the other one is linked.
 *
 * If the lock of a .part can be taken, its writer is dead. The process that takes it removes the file, because the dead
 * writer may have linked it, and makes a new one. A finished object has mode 0400 and is never written.
 *
 * An object may lose its name while a process links it, because another process gives up the last link. The process keeps
 * its bytes, and gives the object its name again when it notices.
 *
 * The descriptors belong to the caller, who closes them in a forked child: a child that kept the one of a claim would keep
 * the claim of a dead parent.
 *
 * Makes no driver call. Any thread; two threads of a process do not use one name at once. */
#ifndef TMS_SHARED_ENTRY_H
#define TMS_SHARED_ENTRY_H

#include "backup/shared/folder.h"

typedef enum tms_shared_state {
    TMS_SHARED_HELD,    /* it exists, and the holder has a link */
    TMS_SHARED_CLAIMED, /* it does not exist; this process may write it */
    TMS_SHARED_BUSY     /* another process writes it */
} tms_shared_state_t;

typedef struct tms_shared_attempt {
    tms_shared_state_t state;
    int fd;           /* HELD: open for reading. CLAIMED: open for writing, empty and locked. BUSY: -1 */
    uint64_t written; /* BUSY: the bytes that are there now */
} tms_shared_attempt_t;

/* Links the object if it exists and has `bytes` bytes. `claim`: if it does not, claims it; else the state is then BUSY with
 * 0 bytes. An object of another size is damaged: TMS_BACKUP_IO with its name, and it is rejected as below. TMS_BACKUP_IO if
 * the folder is full, with a sentence about TMS_SHARED_DIR and --shm-size. */
tms_status_t tms_shared_entry_try(const tms_shared_folder_t *folder, const tms_shared_name_t *name, uint64_t bytes,
                                  bool claim, tms_shared_attempt_t *attempt, const tms_error_context_t *context,
                                  tms_error_t *error);
/* Opens a held object for reading. Returns -1 if that fails: its mapping has the bytes as well. */
int tms_shared_entry_open(const tms_shared_folder_t *folder, const tms_shared_name_t *name);
/* Reads bytes of an open object at `offset`. False if that fails. */
bool tms_shared_entry_read(int fd, void *data, uint64_t bytes, uint64_t offset);
/* Appends bytes to a claimed object at `offset`. A full folder, and a limit of this process (RLIMIT_FSIZE, without SIGXFSZ),
 * are TMS_BACKUP_IO as above. The claim stays after a failure. */
tms_status_t tms_shared_entry_write(const tms_shared_folder_t *folder, const tms_shared_name_t *name, int fd,
                                    const void *data, uint64_t bytes, uint64_t offset, const tms_error_context_t *context,
                                    tms_error_t *error);
/* Gives a claimed object that is whole its name. *fd becomes a descriptor for reading of the object that has the name: of
 * this file, or of one that has come before. After a failure the claim is gone. */
tms_status_t tms_shared_entry_finish(const tms_shared_folder_t *folder, const tms_shared_name_t *name, int *fd,
                                     const tms_error_context_t *context, tms_error_t *error);
/* Removes the file of a claim, and leaves it open, because another thread may write to it. `finish` then fails. */
void tms_shared_entry_withdraw(const tms_shared_folder_t *folder, const tms_shared_name_t *name, int fd);
/* Gives up a claim, and removes the file. Closes the descriptor. */
void tms_shared_entry_abandon(const tms_shared_folder_t *folder, const tms_shared_name_t *name, int fd);
/* Removes the holder's link, and the object if no other holder links it. False, with errno set, if one of them is still
 * there. */
bool tms_shared_entry_drop(const tms_shared_folder_t *folder, const tms_shared_name_t *name);
/* Takes its name from a damaged object that the holder links, and removes the link, so that the object is made again. Other
 * holders keep their links to the damaged one. An object that has got the name since is left alone. If it gets the name
 * between the look and the unlink, it loses it: its holders keep it, and it is written once more. False, with errno set, if
 * the object still has its name, or the holder the link. */
bool tms_shared_entry_reject(const tms_shared_folder_t *folder, const tms_shared_name_t *name);

#endif
