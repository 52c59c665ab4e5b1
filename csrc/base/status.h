/* The error value: filled in one place, so that every message has the same shape.
 *
 * A message reads "<operation>: <what>; <call> failed with <name> (<number>): <bytes> bytes, device <d>, tag '<t>';
 * <detail>. <Advice>." without the parts that do not apply. All functions may be called on any thread, take no lock, and
 * accept a NULL error. */
#ifndef TMS_STATUS_H
#define TMS_STATUS_H

#include "include/tms.h"

/* What is known where an error is raised. Zero-initialised fields mean "does not apply"; `device` needs TMS_NO_DEVICE. */
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

/* Each fills *error from the context and returns the status to hand on, so that a caller can write
 * `return tms_error_set(...)`. `format` is the detail of the case, without a capital at its beginning and a full stop at its
 * end; what the status alone advises follows it where that adds something (status.c). */
__attribute__((format(printf, 4, 5))) tms_status_t tms_error_set(tms_error_t *error, tms_status_t status,
                                                                 const tms_error_context_t *context, const char *format,
                                                                 ...);

/* Adds to the message of an error that is already set, which ends with a full stop. NULL is fine. */
__attribute__((format(printf, 2, 3))) void tms_error_append(tms_error_t *error, const char *format, ...);

/* The same with "2097152 bytes (2.0 MiB)". */
void tms_error_append_bytes(tms_error_t *error, uint64_t bytes);

/* A driver call failed with `result`. The status follows from the result: out of memory, device lost (sticky errors), driver
 * unavailable (not initialised, no device, deinitialised), capture in progress (the stream-capture family), invalid state
 * (not permitted, which is what a host callback is told), else TMS_DRIVER. `name` is the driver's name of the result, or
 * NULL where the driver does not know one. */
tms_status_t tms_error_set_driver(tms_error_t *error, const tms_error_context_t *context, const char *call, int result,
                                  const char *name);

/* A system call failed with errno `os_error`: ENOMEM gives TMS_OUT_OF_HOST_MEMORY, everything else TMS_BACKUP_IO. `path` may
 * be NULL. */
tms_status_t tms_error_set_os(tms_error_t *error, const tms_error_context_t *context, const char *call, int os_error,
                              const char *path);

/* Which status a CUresult means. Public for the tests. */
tms_status_t tms_status_from_driver(int result);

#endif
