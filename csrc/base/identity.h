/* What tells this process from others: the boot, the PID namespace, the moment at which it was started, as /proc says. Owns
 * nothing; any thread, no lock. Async-signal-safe. */
#ifndef TMS_IDENTITY_H
#define TMS_IDENTITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { TMS_BOOT_ID_BYTES = 36 }; /* a UUID as text, without a NUL */

/* Reads the beginning of a file. -1 and errno on failure. */
ssize_t tms_identity_read(const char *path, char *text, size_t bytes);
/* The kernel's number of this boot. False: unknown. */
bool tms_identity_boot_id(char boot_id[TMS_BOOT_ID_BYTES]);
/* The device and inode of this process's PID namespace. False: unknown. */
bool tms_identity_namespace(dev_t *device, ino_t *inode);
/* When this process was started, in clock ticks after the boot; 0: unknown. */
uint64_t tms_identity_started(void);

#endif
