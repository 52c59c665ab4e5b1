/* Inside of the disk backups: between memory and one backup file. Used by backup/disk/transfer.c, the queue
 * (backup/disk/queue.h) and backup/disk/copy.c.
 *
 * A handle is a file that was opened for one direction, past the page cache (O_DIRECT) where the file system takes that. A
 * request moves one range of it and knows the checksums: they are computed from the memory before it is written, and
 * compared before what was read may be used. How the bytes move is open: the kernel may be given the part that
 * tms_disk_request_part names, and tms_disk_request_end does what is left in the calling thread: all of it, if that part
 * failed. So a request fails only with what pread or pwrite says.
 *
 * Direct transfers are of whole TMS_DISK_ALIGNMENT bytes at such offsets, from and to such addresses. Everything else (the
 * end of a file, the rest of a short transfer, a file system or memory that refuses) goes through a second, ordinary
 * descriptor.
 *
 * A request is used by one thread at a time, a handle by several. */
#ifndef TMS_BACKUP_DISK_TRANSFER_H
#define TMS_BACKUP_DISK_TRANSFER_H

#include "backup/disk/disk.h"

#define TMS_DISK_ALIGNMENT ((uint64_t)4096)

typedef struct tms_disk_handle {
    tms_disk_file_t *file;
    bool write;
    int direct_fd;        /* -1: none */
    _Atomic int plain_fd; /* -1: not needed yet */
    _Atomic bool direct;  /* the direct descriptor works, as far as is known */
} tms_disk_handle_t;

typedef enum tms_disk_performer { TMS_DISK_BY_CALLER, TMS_DISK_BY_KERNEL, TMS_DISK_BY_WORKERS } tms_disk_performer_t;

typedef struct tms_disk_request {
    tms_disk_handle_t *handle;
    char *data;
    uint64_t bytes, offset; /* as of tms_disk_file_write */
    tms_error_context_t context;
    tms_status_t status;
    tms_error_t error;
    tms_disk_performer_t performer; /* from here on: its performer's (backup/disk/queue.c, backup/disk/workers.c) */
    struct tms_disk_request *next;  /* in the queue of the workers */
    bool done;                      /* `status` counts; by workers: under their lock */
    bool arrived;                   /* the kernel has done its part, and `result` is bytes or a negative errno */
    int result;
} tms_disk_request_t;

/* Opens the file, if it is still the one that was made. `direct`: if that is possible. */
tms_status_t tms_disk_handle_open(tms_disk_handle_t *handle, tms_disk_file_t *file, bool write, bool direct,
                                  const tms_error_context_t *context, tms_error_t *error);
/* An error only where what was written may be lost. */
tms_status_t tms_disk_handle_close(tms_disk_handle_t *handle, const tms_error_context_t *context, tms_error_t *error);

/* What comes before the bytes move: the checksums of what is to be written. */
void tms_disk_request_begin(tms_disk_request_t *request);
/* How many bytes, from the first on, can be transferred by the direct descriptor. */
uint64_t tms_disk_request_part(const tms_disk_request_t *request);
/* What comes after the first `moved` bytes: the rest of them, and the checksums of what was read. `status` says how. */
void tms_disk_request_end(tms_disk_request_t *request, uint64_t moved);
/* All of it in this thread. */
void tms_disk_request_perform(tms_disk_request_t *request);

#endif
