/* Internal to the disk backups: transfers between memory and one backup file. Used by backup/disk/transfer.c, the queue
 * (backup/disk/queue.h) and backup/disk/copy.c.
 *
 * A handle is a file opened for one direction, with O_DIRECT if the file system supports it. A request moves one range of
 * it. Checksums are computed before memory is written, and compared before data that was read may be used. The kernel may
 * transfer the part given by tms_disk_request_part; tms_disk_request_end then transfers the rest on the calling thread, or
 * everything if that part failed. So a request fails only with an error of pread or pwrite.
 *
 * Sizes, offsets and addresses of direct transfers are multiples of TMS_DISK_ALIGNMENT. Everything else (the end of a file,
 * the rest of a short transfer, a file system or memory without direct I/O) goes through a second, ordinary descriptor.
 *
 * A request is used by one thread at a time, a handle by several. No lock. */
#ifndef TMS_BACKUP_DISK_TRANSFER_H
#define TMS_BACKUP_DISK_TRANSFER_H

#include "backup/disk/disk.h"

#define TMS_DISK_ALIGNMENT ((uint64_t)4096)

typedef struct tms_disk_handle {
    tms_disk_file_t *file;
    bool write;
    int direct_fd;        /* -1: none */
    _Atomic int plain_fd; /* -1: not needed yet */
    _Atomic bool direct;  /* the direct descriptor has not failed */
} tms_disk_handle_t;

typedef enum tms_disk_performer { TMS_DISK_BY_CALLER, TMS_DISK_BY_KERNEL, TMS_DISK_BY_WORKERS } tms_disk_performer_t;

typedef struct tms_disk_request {
    tms_disk_handle_t *handle;
    char *data;
    uint64_t bytes, offset; /* as in tms_disk_file_write */
    tms_error_context_t context;
    tms_status_t status;
    tms_error_t error;
    tms_disk_performer_t performer; /* from here on owned by its performer (backup/disk/queue.c, backup/disk/workers.c) */
    struct tms_disk_request *next;  /* in the queue of the workers */
    bool done;                      /* `status` is valid; for workers: under their lock */
    bool arrived;                   /* the kernel has completed its part; `result` is bytes or a negative errno */
    int result;
} tms_disk_request_t;

/* Opens the file if it is still the original one. `direct`: with direct I/O if possible. */
tms_status_t tms_disk_handle_open(tms_disk_handle_t *handle, tms_disk_file_t *file, bool write, bool direct,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Fails only if written data may be lost. */
tms_status_t tms_disk_handle_close(tms_disk_handle_t *handle, const tms_error_context_t *context, tms_error_t *error);

/* To be called before the transfer: computes the checksums of data to be written. */
void tms_disk_request_begin(tms_disk_request_t *request);
/* Returns the number of bytes at the beginning that the direct descriptor can transfer. */
uint64_t tms_disk_request_part(const tms_disk_request_t *request);
/* To be called after `moved` bytes were transferred: transfers the rest, verifies data that was read, and sets `status`. */
void tms_disk_request_end(tms_disk_request_t *request, uint64_t moved);
/* Performs the whole request on the calling thread. */
void tms_disk_request_perform(tms_disk_request_t *request);

#endif
