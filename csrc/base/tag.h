/* Tags, interned: one tms_tag_t for each name, which lives as long as its table, so that segments and threads can hold
 * pointers to it and compare them. They are found by hash, in constant time, and listed from the newest to the oldest.
 * Nothing here allocates except interning a tag never seen before.
 *
 * Lock: the table has its own mutex, a leaf (nothing else is taken under it). The index grows under it, each time to twice
 * its size, so that an insertion costs constant time on average. Any thread may call. */
#ifndef TMS_TAG_H
#define TMS_TAG_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/stats.h"
#include "base/status.h"

typedef struct tms_tag {
    struct tms_tag *next;         /* older */
    uint64_t hash;                /* of the name */
    uint64_t mark;                /* number of the last walk over the segments that selected or counted this tag; under the
                                     saver's lock */
    _Atomic uint64_t paused;      /* segments of the tag that are not ACTIVE; written under the saver's lock */
    _Atomic uint64_t pause_epoch; /* pauses that changed a segment of the tag; written under the saver's lock */
    _Atomic uint64_t discards;    /* times that a pause discarded contents of the tag; written under the saver's lock */
    _Atomic uint64_t following_ended; /* regions of the tag that follow another thread's have ended if they were entered
                                         before this id (core/model/region.h) */
    struct tms_kind *kinds;           /* its kinds of memory (core/model/kinds.h); under the saver's lock */
    tms_gauge_t mapped;               /* physical memory of its segments; written under the saver's lock */
    size_t row;                       /* its row in the last walk that listed tags; under the saver's lock */
    _Atomic bool used;                /* a segment of this tag was ever allocated */
    char name[];                      /* UTF-8, not empty */
} tms_tag_t;

/* Open addressing: a tag lies in the first free slot from the slot of its hash on. */
typedef struct tms_tag_index {
    size_t size; /* a power of two; at least half of the slots are free */
    tms_tag_t *slots[];
} tms_tag_index_t;

typedef struct tms_tag_table {
    pthread_mutex_t lock;
    tms_tag_t *first; /* the newest */
    size_t count;
    tms_tag_index_t *index; /* NULL: no tag yet */
    uint64_t steps;         /* slots that searches have visited; for complexity tests */
} tms_tag_table_t;

void tms_tag_table_init(tms_tag_table_t *table);
void tms_tag_table_release(tms_tag_table_t *table);
/* Finds the tag with this name, or creates it. TMS_INVALID_ARGUMENT for NULL or ""; TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_tag_intern(tms_tag_table_t *table, const char *name, tms_tag_t **tag, tms_error_t *error);
tms_tag_t *tms_tag_find(tms_tag_table_t *table, const char *name); /* or NULL */
/* tms_api_t.tags. */
size_t tms_tag_list(tms_tag_table_t *table, tms_tag_row_t *rows, size_t capacity);
/* Sets the peak of each tag to its mapped bytes. The caller holds the saver's lock. */
void tms_tag_reset_peaks(tms_tag_table_t *table);
/* In a forked child: reinitialises the lock, which another thread may have held. */
void tms_tag_table_after_fork_in_child(tms_tag_table_t *table);

#endif
