/* The file of a shared page: made, locked and mapped for its process; opened by a reader.
 *
 * tms-<pid>-<random>.page in a private directory (private_directory.h): the one that TMS_SHARED_PAGE names, else below
 * /dev/shm, because the page is written under a lock and must never wait for a disk. Mode 0600. Its blocks are reserved
 * before it is mapped, so that no write raises SIGBUS on a full file system. It is locked (flock) as long as its process
 * keeps it open; a file shorter than a page is being made. No lock of ours; any thread. */
#ifndef TMS_SHARED_PAGE_FILE_H
#define TMS_SHARED_PAGE_FILE_H

#include <limits.h>
#include <stdatomic.h>

#include "base/private_directory.h"
#include "include/tms_shared_page.h"

typedef _Atomic uint64_t tms_shared_word_t;
/* The number of a member's word. */
#define TMS_SHARED_WORD(member) (offsetof(tms_shared_page_contents_t, member) / sizeof(uint64_t))

typedef struct tms_shared_page_file {
    int fd;                   /* locked; -1: no file */
    tms_shared_word_t *words; /* mapped; NULL: no file */
    char path[PATH_MAX];
} tms_shared_page_file_t;

/* Returns the directory that a variable names, or the default. */
tms_directory_choice_t tms_shared_page_directory(const char *configured);

/* Makes the file, which is filled with zeros. If that fails, returns false with *failure and the path that it concerns, and
 * leaves nothing behind. */
bool tms_shared_page_file_create(tms_shared_page_file_t *file, const char *configured, tms_directory_failure_t *failure);
/* Removes the name of the file, if there is one. It stays mapped. */
void tms_shared_page_file_unlink(tms_shared_page_file_t *file);
/* Unmaps and closes the file, and leaves its name, which in a forked child belongs to the parent. Async-signal-safe. */
void tms_shared_page_file_close(tms_shared_page_file_t *file);

/* ---- in another process; `fd` is open for reading, and for `request` also for writing ---- */

typedef enum tms_shared_page_reading {
    TMS_SHARED_PAGE_READ = 0,
    TMS_SHARED_PAGE_BUSY,    /* written to at every attempt: its process may be stopped */
    TMS_SHARED_PAGE_FOREIGN, /* not a page, or one of another format: see copy->magic and copy->format */
    TMS_SHARED_PAGE_FAILED   /* errno */
} tms_shared_page_reading_t;

/* Copies the page. */
tms_shared_page_reading_t tms_shared_page_file_read(int fd, tms_shared_page_contents_t *copy);
/* Makes a request, or withdraws it. On failure returns false and sets errno. */
bool tms_shared_page_file_request(int fd, unsigned kind, bool withdraw);

#endif
