/* The shared page of this process (tms_shared_page.h): its one writer.
 *
 * Owns the file, an image of the page in private memory, and which tag and device each row is of. Changes go to the image.
 * `publish` copies what they concern to the page, under the page's sequence, so that a reader sees all changes of a call or
 * none, and so that the page is inconsistent for the time of a short copy only.
 *
 * `open` is called before the first allocation, with no lock held: it makes system calls. Only one thread opens, under
 * `opening`, a leaf that is held while the file is made; the others wait. All other functions need the saver's lock, except
 * those of requests, which any thread may call without a lock. While there is no page (not opened, turned off, failed) they
 * do nothing. Nothing here allocates after `open`. `set_role` takes `opening`, so that it may wait for the file.
 *
 * A row is given to a tag and device at its first allocation and kept. Once all are in use, a row without allocations is
 * given away, and its totals are added to `others`; if every row has allocations, what follows is counted in `others`. */
#ifndef TMS_SHARED_PAGE_H
#define TMS_SHARED_PAGE_H

#include <pthread.h>
#include <stdbool.h>

#include "base/shared_page_file.h"
#include "base/tag.h"

/* The number of a row: 0 is `others`, 1 the first of the rows. */
typedef uint16_t tms_shared_row_t;

typedef enum tms_shared_page_state {
    TMS_SHARED_PAGE_NOT_OPENED = 0,
    TMS_SHARED_PAGE_OPEN,
    TMS_SHARED_PAGE_OFF /* turned off, failed, or the process exits */
} tms_shared_page_state_t;

/* What the program says of its process. It may be known before the page is made, or after. */
typedef struct tms_shared_page_role {
    uint64_t name[TMS_SHARED_PAGE_TEXT_WORDS]; /* zeros: the program's */
    uint64_t rank_known, rank;
    uint64_t serves; /* 1: requests are served after each pause and resume */
} tms_shared_page_role_t;

typedef struct tms_shared_page {
    _Atomic int state; /* tms_shared_page_state_t */
    pthread_mutex_t opening;
    const char *directory; /* owned by the configuration; "": the default */
    tms_shared_page_file_t file;
    tms_shared_page_contents_t *image; /* only `process`, `others` and `rows` are used */
    struct {
        const tms_tag_t *tag; /* NULL: not given yet */
        uint64_t allocations; /* alive */
        uint64_t call;        /* the last one that was counted */
    } owners[TMS_SHARED_PAGE_ROWS + 1];
    uint64_t calls;                       /* pauses and resumes that were counted by rows */
    bool dirty[TMS_SHARED_PAGE_ROWS + 1]; /* to be copied */
    tms_shared_page_role_t role;          /* under `opening` */
} tms_shared_page_t;

/* What is known of the process when its page is made. */
typedef struct tms_shared_page_description {
    int device_count;
    tms_shared_page_device_t devices[TMS_SHARED_PAGE_DEVICES];
} tms_shared_page_description_t;

/* A difference, modulo 2^64. */
typedef struct tms_shared_page_change {
    uint64_t resident_bytes, paused_bytes, slack_bytes, host_backup_bytes, disk_backup_bytes, damaged;
} tms_shared_page_change_t;

/* A call of pause or resume, or its effect on one row. */
typedef struct tms_shared_page_outcome {
    tms_shared_page_call_t call; /* IDLE: not to be counted */
    bool succeeded;
    uint64_t ended, nanoseconds;
} tms_shared_page_outcome_t;

/* `wanted` false: turned off. Makes no file. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_shared_page_init(tms_shared_page_t *page, bool wanted, const char *directory, tms_error_t *error);
/* For tests: removes the file. */
void tms_shared_page_release(tms_shared_page_t *page);

static inline bool tms_shared_page_is_open(const tms_shared_page_t *page) {
    return atomic_load_explicit(&page->state, memory_order_acquire) == TMS_SHARED_PAGE_OPEN;
}
static inline bool tms_shared_page_may_open(const tms_shared_page_t *page) {
    return atomic_load_explicit(&page->state, memory_order_acquire) == TMS_SHARED_PAGE_NOT_OPENED;
}

/* Makes the page, unless that was tried before. False, once, with the failure and page->file.path. */
bool tms_shared_page_open(tms_shared_page_t *page, const tms_shared_page_description_t *description,
                          tms_private_directory_failure_t *failure);
/* At exit: removes the file's name. No page is made after this. */
void tms_shared_page_at_exit(tms_shared_page_t *page);
/* In a forked child, with `opening` locked before the fork: the page is the parent's. The child makes its own at its first
 * allocation. Async-signal-safe. */
void tms_shared_page_after_fork_in_child(tms_shared_page_t *page);

/* ---- under the saver's lock ---- */

/* The row for an allocation of this tag and device, or for a failed one. */
tms_shared_row_t tms_shared_page_row(tms_shared_page_t *page, const tms_tag_t *tag, int device);
void tms_shared_page_add_allocation(tms_shared_page_t *page, tms_shared_row_t row);
void tms_shared_page_remove_allocation(tms_shared_page_t *page, tms_shared_row_t row);
void tms_shared_page_fail_allocation(tms_shared_page_t *page, tms_shared_row_t row);
void tms_shared_page_change(tms_shared_page_t *page, tms_shared_row_t row, const tms_shared_page_change_t *change);

/* A call begins to move allocations. It is the one to which `count` refers. */
void tms_shared_page_begin_moves(tms_shared_page_t *page, tms_shared_page_call_t call, uint64_t now);
/* Counts the call in a row, once. */
void tms_shared_page_count(tms_shared_page_t *page, tms_shared_row_t row, const tms_shared_page_outcome_t *outcome);
void tms_shared_page_end_moves(tms_shared_page_t *page);
/* Counts a call in the numbers of the process. */
void tms_shared_page_count_call(tms_shared_page_t *page, const tms_shared_page_outcome_t *outcome);
/* Copies what was changed to the page. Called once at the end of each change, before the lock is released. */
void tms_shared_page_publish(tms_shared_page_t *page);

/* Sets the role, also of a page that is made later, and in a forked child. */
void tms_shared_page_set_role(tms_shared_page_t *page, const tms_shared_page_role_t *role);
/* Truncates a text to the words, which it pads with zeros. */
void tms_shared_page_copy_text(uint64_t words[TMS_SHARED_PAGE_TEXT_WORDS], const char *text);

/* ---- requests ---- */

/* The bits of the requests; 0 without a page. One load. */
static inline uint64_t tms_shared_page_requests(tms_shared_page_t *page) {
    if (!tms_shared_page_is_open(page)) return 0;
    return atomic_load_explicit(&page->file.words[TMS_SHARED_WORD(requests)], memory_order_acquire);
}
/* A request has been served; or not, because of an errno (0: another reason). */
void tms_shared_page_serve(tms_shared_page_t *page, unsigned kind, bool served, int os_error);

#endif
