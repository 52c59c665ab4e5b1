/* Internal to the shared store: the file `key` of its folder.
 *
 * The file has a header with the number of the format, and a tms_shared_key_t. It has mode 0400. It is written in the holder
 * of the process that makes it, and linked, so that it is whole or does not exist; the first link counts. If the process is
 * killed, the unfinished file is removed with its holder. Any thread; no lock, no state. */
#ifndef TMS_SHARED_KEY_H
#define TMS_SHARED_KEY_H

#include <stdbool.h>

#include "backup/shared/names.h"
#include "base/status.h"

enum { TMS_SHARED_FORMAT = 1 };

/* Reads the key of the folder `path`. *found is false if there is none. A key of another format or length, a damaged one and
 * one that others can read are TMS_BACKUP_IO with the name of the file. */
tms_status_t tms_shared_key_read(int root, const char *path, tms_shared_key_t *key, bool *found,
                                 const tms_error_context_t *context, tms_error_t *error);
/* Makes a random key of the folder, unless it has one. `key` is overwritten. */
tms_status_t tms_shared_key_make(int root, int holder, const char *path, tms_shared_key_t *key,
                                 const tms_error_context_t *context, tms_error_t *error);

#endif
