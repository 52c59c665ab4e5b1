/* Tags and the thread's stack of region settings.
 *
 * Tags are interned: a tms_tag_t lives as long as its table, so that segments and threads can hold pointers to it and
 * compare them. They are found by hash, in constant time, and listed from the newest to the oldest. Settings are per thread:
 * a fixed stack in thread-local storage whose bottom entry is, until the thread enters a region, the process's initial
 * settings (TMS_INIT_*). Nothing here allocates except interning a tag never seen before.
 *
 * Each level has an id that no other level of the process has, so that it can be left in any order: tasks of an event loop
 * and generators share a thread, and leave their regions when they come to it.
 *
 * Lock: the tag table has its own mutex, a leaf (nothing else is taken under it). The index grows under it, each time to
 * twice its size, so that an insertion costs constant time on average. The stack belongs to its thread. */
#ifndef TMS_REGION_H
#define TMS_REGION_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "config.h"
#include "status.h"

enum { TMS_REGION_MAX_DEPTH = 64 };
#define TMS_DEFAULT_TAG "default"

typedef struct tms_tag {
    struct tms_tag *next;         /* older */
    uint64_t hash;                /* of the name */
    uint64_t mark;                /* the look at all segments that has chosen or counted it last; under the saver's lock */
    _Atomic uint64_t paused;      /* segments of the tag that are not ACTIVE; written under the saver's lock */
    _Atomic uint64_t pause_epoch; /* pauses that changed a segment of the tag; written under the saver's lock */
    _Atomic bool used;            /* a segment of this tag was ever allocated */
    char name[];                  /* UTF-8, not empty */
} tms_tag_t;

/* Open addressing: a tag lies in the first slot, from that of its hash on, that was free. */
typedef struct tms_tag_index {
    size_t size; /* a power of two; half of the slots are free at least */
    tms_tag_t *slots[];
} tms_tag_index_t;

typedef struct tms_tag_table {
    pthread_mutex_t lock;
    tms_tag_t *first; /* the newest */
    size_t count;
    tms_tag_index_t *index; /* NULL: no tag yet */
    uint64_t steps;         /* slots that searches have looked at; for tests of how their work grows */
} tms_tag_table_t;

void tms_tag_table_init(tms_tag_table_t *table);
void tms_tag_table_release(tms_tag_table_t *table);
/* The tag of that name, made if it is new. TMS_INVALID_ARGUMENT for NULL or "", TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_tag_intern(tms_tag_table_t *table, const char *name, tms_tag_t **tag, tms_error_t *error);
tms_tag_t *tms_tag_find(tms_tag_table_t *table, const char *name); /* or NULL */
/* In a forked child: another thread may have held the lock. */
void tms_tag_table_after_fork_in_child(tms_tag_table_t *table);

/* One level of the stack. */
typedef struct tms_region {
    const tms_tag_t *tag;
    tms_backup_kind_t backup;
    tms_host_policy_t host_policy;
    bool managed;
} tms_region_t;

typedef struct tms_region_defaults {
    tms_tag_table_t tags;
    tms_region_t initial;        /* what the TMS_INIT_* variables say */
    _Atomic uint64_t last_level; /* the id of the level entered last, on any thread */
} tms_region_defaults_t;

/* TMS_OUT_OF_HOST_MEMORY if the default tag cannot be made. */
tms_status_t tms_region_init(tms_region_defaults_t *defaults, const tms_config_t *config, tms_error_t *error);
void tms_region_release(tms_region_defaults_t *defaults);

/* All act on the calling thread. Depth 0 is the initial level, which is never left. */
/* `level` is the id of the new innermost level; never 0. */
tms_status_t tms_region_enter(tms_region_defaults_t *defaults, const tms_region_settings_t *settings, uint64_t *level,
                              tms_error_t *error);
/* Leaves that level and no other: the number of levels entered after it that stay, or TMS_NO_SUCH_LEVEL if this thread has
 * no level of that id. */
int tms_region_leave(tms_region_defaults_t *defaults, uint64_t level);
/* tms_region_enter for callers that leave in order: `depth` is the number of levels with the new one. */
tms_status_t tms_region_push(tms_region_defaults_t *defaults, const tms_region_settings_t *settings, int *depth,
                             tms_error_t *error);
void tms_region_pop(tms_region_defaults_t *defaults,
                    int depth); /* back to `depth - 1` levels; ignores a depth not reached */
tms_region_t tms_region_current(tms_region_defaults_t *defaults, int *depth); /* `depth` may be NULL */
/* Replaces the innermost level (also the initial one, for this thread only). */
tms_status_t tms_region_set(tms_region_defaults_t *defaults, const tms_region_settings_t *settings, tms_error_t *error);

/* Checks settings that come from outside and interns their tag. */
tms_status_t tms_region_from_settings(tms_region_defaults_t *defaults, const tms_region_settings_t *settings,
                                      tms_region_t *region, tms_error_t *error);

#endif
