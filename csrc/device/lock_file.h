/* The files of the devices' locks (device_lock.h) and of the requests that wait for them (device_queue.h): how they are
 * opened and checked, and the record of the process that has locked one.
 *
 * The directory must be private (base/private_directory.h). It is TMS_LOCK_DIR, else /tmp/torch_memory_saver-<uid>
 * (XDG_RUNTIME_DIR is removed at the user's last logout, and missing in services and containers). Files have mode 0600, are
 * opened without following links, and must be regular files of this user. Owns nothing; any thread, no lock. */
#ifndef TMS_LOCK_FILE_H
#define TMS_LOCK_FILE_H

#include <limits.h>
#include <stdbool.h>

#include "base/private_directory.h"

enum { TMS_LOCK_RECORD_BYTES = 48 }; /* a process id and a time, both decimal, separated by a space, and a newline */

/* The process that has locked a file, as it has recorded itself there. For messages only: the kernel alone knows whether
 * the file is locked. */
typedef struct tms_lock_record {
    long process;    /* 0: not known */
    long long since; /* seconds since the epoch */
} tms_lock_record_t;

/* A failure and the file that it concerns. */
typedef struct tms_lock_failure {
    const char *call;
    int os_error; /* EWOULDBLOCK: another process holds the device, or is served first */
    int device;
    bool replaced; /* this process holds a lock file that was removed, and another process the new one */
    bool queued;   /* `earlier` is served first; the holder was not looked for */
    tms_lock_record_t holder, earlier;
    char path[PATH_MAX];
} tms_lock_failure_t;

/* Sets the call and its errno. Returns false, so that a caller can write `return tms_lock_fail(...)`. */
bool tms_lock_fail(tms_lock_failure_t *failure, const char *call, int os_error);

tms_directory_choice_t tms_lock_directory(const char *configured);
/* Opens the directory, which is made if it is missing, and writes its path to the failure. Returns an O_PATH descriptor, or
 * -1 and the failure. */
int tms_lock_directory_open(const char *configured, tms_lock_failure_t *failure);
/* Extends the directory's path in the failure to that of a file in it. */
void tms_lock_append_name(tms_lock_failure_t *failure, const char *name);

/* Opens and checks a file. `flags` is O_CREAT or 0. Returns its descriptor, or -1 and the failure with the path
 * of the directory. */
int tms_lock_file_open(int directory, const char *name, int flags, tms_lock_failure_t *failure);
/* Locks any open file without waiting. Returns 0 or an errno: EWOULDBLOCK if it is locked already. */
int tms_lock_file_try(int fd);
/* Whether an open file is still the one at the path in the failure. */
bool tms_lock_file_find_current(int fd, bool *current, tms_lock_failure_t *failure);

tms_lock_record_t tms_lock_record_read(int fd);
/* Writes the record of this process. Returns its length. */
int tms_lock_record_write(char text[TMS_LOCK_RECORD_BYTES]);

#endif
