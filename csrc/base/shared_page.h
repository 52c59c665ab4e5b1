/* The shared page of this process (tms_shared_page.h): its one writer.
 *
 * Owns the file, an image of the page in private memory, and the assignment of rows to tags and devices. Changes go to the
 * image. `publish` copies the changed parts to the page, under the page's sequence. So a reader sees all changes of a call
 * or none, and the page is inconsistent only for the time of a short copy.
 *
 * `open` is called before the first allocation, with no lock held: it makes system calls. Only one thread opens, under
 * `opening`, a leaf that is held while the file is made; the others wait. All other functions need the saver's lock, except
 * the functions for requests, which any thread may call without a lock. While there is no page (not opened, turned off,
 * failed) they do nothing. Nothing here allocates after `open`. `set_role` takes `opening`, so that it may wait for the
 * file.
 *
 * A row is assigned to a tag and device at their first allocation, and stays theirs. Once all rows are in use, a row without
 * allocations is assigned again, and its totals are added to `others`. If every row has allocations, further tags and
 * devices are counted in `others`. */
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

/* The program's description of its process. It may be set before or after the page is made. */
typedef struct tms_shared_page_role {
    uint64_t name[TMS_SHARED_PAGE_TEXT_WORDS]; /* zeros: the name of the program */
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
        const tms_tag_t *tag; /* NULL: not assigned yet */
        uint64_t allocations; /* number of allocations that are alive */
        uint64_t call;        /* the last call that was counted */
    } owners[TMS_SHARED_PAGE_ROWS + 1];
    uint64_t calls;                       /* number of pauses and resumes that rows have counted */
    bool dirty[TMS_SHARED_PAGE_ROWS + 1]; /* to be copied */
    tms_shared_page_role_t role;          /* under `opening` */
} tms_shared_page_t;

/* The facts about the process that are known when its page is made. */
typedef struct tms_shared_page_description {
    int device_count;
    tms_shared_page_device_t devices[TMS_SHARED_PAGE_DEVICES];
} tms_shared_page_description_t;

/* A difference, modulo 2^64. */
typedef struct tms_shared_page_change {
    uint64_t resident_bytes, paused_bytes, slack_bytes, host_backup_bytes, disk_backup_bytes, shared_backup_bytes, damaged;
} tms_shared_page_change_t;

/* A call of pause or resume, or its effect on one row. */
typedef struct tms_shared_page_outcome {
    tms_shared_page_call_t call; /* IDLE: the call is not counted */
    bool succeeded;
    uint64_t ended, nanoseconds;
} tms_shared_page_outcome_t;

/* `wanted` false turns the page off. Makes no file. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_shared_page_init(tms_shared_page_t *page, bool wanted, const char *directory, tms_error_t *error);
/* For tests: removes the file. */
void tms_shared_page_release(tms_shared_page_t *page);

static inline bool tms_shared_page_is_open(const tms_shared_page_t *page) {
    return atomic_load_explicit(&page->state, memory_order_acquire) == TMS_SHARED_PAGE_OPEN;
}
static inline bool tms_shared_page_may_open(const tms_shared_page_t *page) {
    return atomic_load_explicit(&page->state, memory_order_acquire) == TMS_SHARED_PAGE_NOT_OPENED;
}

/* Makes the page, unless that was tried before. If it fails, returns false once, with *failure and page->file.path set. */
bool tms_shared_page_open(tms_shared_page_t *page, const tms_shared_page_description_t *description,
                          tms_directory_failure_t *failure);
/* At exit: removes the file's name. No page is made after this. */
void tms_shared_page_at_exit(tms_shared_page_t *page);
/* In a forked child, with `opening` locked before the fork: the page is the parent's. The child makes its own at its first
 * allocation. Async-signal-safe. */
void tms_shared_page_after_fork_in_child(tms_shared_page_t *page);

/* ---- under the saver's lock ---- */

/* Returns the row for an allocation of this tag and device, or for a failed allocation. */
tms_shared_row_t tms_shared_page_row(tms_shared_page_t *page, const tms_tag_t *tag, int device);
void tms_shared_page_add_allocation(tms_shared_page_t *page, tms_shared_row_t row);
void tms_shared_page_remove_allocation(tms_shared_page_t *page, tms_shared_row_t row);
void tms_shared_page_fail_allocation(tms_shared_page_t *page, tms_shared_row_t row);
void tms_shared_page_change(tms_shared_page_t *page, tms_shared_row_t row, const tms_shared_page_change_t *change);

/* Records that a call begins to move allocations. tms_shared_page_count refers to this call. */
void tms_shared_page_begin_moves(tms_shared_page_t *page, tms_shared_page_call_t call, uint64_t now);
/* Counts the call in a row, once. */
void tms_shared_page_count(tms_shared_page_t *page, tms_shared_row_t row, const tms_shared_page_outcome_t *outcome);
void tms_shared_page_end_moves(tms_shared_page_t *page);
/* Counts a call in the numbers of the process. */
void tms_shared_page_count_call(tms_shared_page_t *page, const tms_shared_page_outcome_t *outcome);
/* Copies all changes to the page. Called once at the end of each change, before the lock is released. */
void tms_shared_page_publish(tms_shared_page_t *page);

/* Sets the role. It also applies to a page that is made later, and to the page of a forked child. */
void tms_shared_page_set_role(tms_shared_page_t *page, const tms_shared_page_role_t *role);
/* Truncates a text to the words, which it pads with zeros. */
void tms_shared_page_copy_text(uint64_t words[TMS_SHARED_PAGE_TEXT_WORDS], const char *text);

/* ---- requests ---- */

/* Returns a mask in which bit k is set if request k is made. 0 without a page. Costs one load for each kind. */
static inline uint64_t tms_shared_page_requests(tms_shared_page_t *page) {
    uint64_t mask = 0;
    if (!tms_shared_page_is_open(page)) return 0;
    for (unsigned kind = 0; kind < TMS_SHARED_PAGE_KINDS; kind++) {
        if (atomic_load_explicit(&page->file.words[TMS_SHARED_WORD(requests) + kind], memory_order_acquire) != 0)
            mask |= UINT64_C(1) << kind;
    }
    return mask;
}
/* Records that a request has been served, or that it could not be because of `os_error` (0: another reason). */
void tms_shared_page_serve(tms_shared_page_t *page, unsigned kind, bool served, int os_error);

#endif
