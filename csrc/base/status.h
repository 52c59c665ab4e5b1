/* The error value: filled in one place, so that every message has the same shape.
 *
 * A message reads "<operation>: <what>; <call> failed with <name> (<number>): <size>, device <d>, tag '<t>'; <detail>.
 * <Advice>." without the parts that do not apply. Further points are lines that begin with "- ". All functions may be called
 * on any thread, take no lock, and accept a NULL error. */
#ifndef TMS_STATUS_H
#define TMS_STATUS_H

#include <string.h>

#include "include/tms.h"

/* The facts known where an error is raised. A zero field does not apply; `device` needs TMS_NO_DEVICE for that. */
enum { TMS_NO_DEVICE = -1 };

typedef struct tms_error_context {
    const char *operation; /* "allocate", "pause", ... */
    int device;            /* ordinal, or TMS_NO_DEVICE */
    uint64_t bytes;
    uint64_t address;
    const char *tag;
} tms_error_context_t;

const char *tms_status_name(tms_status_t status); /* "OUT_OF_DEVICE_MEMORY"; "UNKNOWN" for other numbers */
const char *tms_status_text(tms_status_t status); /* the sentence of the table */

void tms_error_clear(tms_error_t *error);

/* Each fills *error from the context and returns the status to hand on, so that a caller can write `return
 * tms_error_set(...)`. `format` is the detail of the case, without an initial capital and a final full stop. The advice of
 * the status follows if it adds something (status.c). */
__attribute__((format(printf, 4, 5))) tms_status_t tms_error_set(tms_error_t *error, tms_status_t status,
                                                                 const tms_error_context_t *context, const char *format,
                                                                 ...);

/* The system's text for an errno, in memory of the enclosing block: strerror() has one buffer for all threads in glibc
 * before release 2.32. */
#define TMS_OS_TEXT(os_error) strerror_r(os_error, (char[TMS_ERROR_NAME_BYTES]){0}, TMS_ERROR_NAME_BYTES)

/* Appends to the message of an error that is already set, which ends with a full stop. `error` may be NULL. */
__attribute__((format(printf, 2, 3))) void tms_error_append(tms_error_t *error, const char *format, ...);

/* Appends a size for people, such as "2.0 MiB". */
void tms_error_append_bytes(tms_error_t *error, uint64_t bytes);

/* Appends the free space of the file system of a path, if it is known. */
void tms_error_append_free_space(tms_error_t *error, const char *path);

/* Appends that undoing the failed operation failed as well, and which call failed. */
void tms_error_append_undoing(tms_error_t *error, const tms_error_t *undoing);

/* Fills *error for a driver call that failed with `result`. The status follows from the result: out of memory, device lost
 * (sticky errors), driver unavailable (not initialised, no device, deinitialised), capture in progress (the stream-capture
 * family), invalid state (not permitted, the result inside a host callback), else TMS_DRIVER. `name` is the driver's name of
 * the result, or NULL if it has none. */
tms_status_t tms_error_set_driver(tms_error_t *error, const tms_error_context_t *context, const char *call, int result,
                                  const char *name);

/* Fills *error for a system call that failed with errno `os_error`. ENOMEM gives TMS_OUT_OF_HOST_MEMORY, any other number
 * TMS_BACKUP_IO. `path` may be NULL. */
tms_status_t tms_error_set_os(tms_error_t *error, const tms_error_context_t *context, const char *call, int os_error,
                              const char *path);

/* Fills *error for such a system call, with a status that the caller chooses. */
tms_status_t tms_error_set_system(tms_error_t *error, tms_status_t status, const tms_error_context_t *context,
                                  const char *call, int os_error, const char *path);

/* Returns the status for a CUresult. Public for the tests. */
tms_status_t tms_status_from_driver(int result);

#endif
