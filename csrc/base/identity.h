/* The identity of this process: the boot, the PID namespace and the time at which it was started, and the state of others,
 * as reported by /proc. Owns nothing; any thread, no lock. Async-signal-safe. */
#ifndef TMS_IDENTITY_H
#define TMS_IDENTITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { TMS_BOOT_ID_BYTES = 36 }; /* a UUID as text, without a NUL */

/* Reads the beginning of a file. Returns -1 and sets errno on failure. */
ssize_t tms_identity_read(const char *path, char *text, size_t bytes);
/* Gets the kernel's identifier of this boot. Returns false if it is unknown. */
bool tms_identity_boot_id(char boot_id[TMS_BOOT_ID_BYTES]);
/* Gets the device and inode of this process's PID namespace. Returns false if they are unknown. */
bool tms_identity_namespace(dev_t *device, ino_t *inode);
/* Returns the time at which this process was started, in clock ticks after the boot, or 0 if it is unknown. */
uint64_t tms_identity_started(void);
/* Returns the letter of a process's state in /proc/<pid>/stat, such as 'R', 'T' (stopped) and 'Z'. Returns 0 and sets errno
 * if the file cannot be read. */
char tms_identity_state(long process);

#endif
