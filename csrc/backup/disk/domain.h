/* The lock domain: the processes whose file locks this process can rely on, and whether one of them runs.
 *
 * A file lock (flock) reliably excludes processes on the same kernel. Processes on other machines, of other boots or in
 * other containers may share the directory through a file system with local locks (NFS with local locks, Lustre, FUSE, 9p,
 * virtiofs): a lock acquired there proves nothing. So the names of backup files contain the lock domain of their process,
 * and only processes of the same domain clean them up.
 *
 * Any thread, no lock, no state. */
#ifndef TMS_DISK_DOMAIN_H
#define TMS_DISK_DOMAIN_H

#include <stdbool.h>
#include <stdint.h>

enum { TMS_DISK_DOMAIN_DIGITS = 16 }; /* hexadecimal digits in file names */

/* A hash of the boot (boot_id), the host's name and the PID namespace. 0: unknown, because /proc is missing or unreadable.
 * This process then cleans up no files, and no other process cleans up its files. */
uint64_t tms_disk_domain(void);

/* Whether a process of this domain runs, according to /proc; false only if it certainly does not. A zombie does not run. An
 * id that has been reused counts as running. */
bool tms_disk_domain_runs(long process);

#endif
