/* The thread's stack of region settings, and the conversion of a caller's settings.
 *
 * Settings are per thread: a fixed stack in thread-local storage whose bottom entry is, until the thread enters a region,
 * the process's initial settings (TMS_INIT_*). Nothing here allocates except interning a tag never seen before (base/tag.h).
 *
 * Each entry has an id that is unique in the process, so that regions can be left in any order: tasks of an event loop and
 * generators share a thread and interleave.
 *
 * A region that *follows* another thread's is entered for a call that the other thread has handed over. A pause of its tag
 * ends it from outside: it stays in the stack until its thread leaves it, and the settings below it are in force.
 *
 * Any thread. Lock: none; the stack belongs to its thread, and the tag table has its own lock. */
#ifndef TMS_REGION_H
#define TMS_REGION_H

#include "base/config.h"
#include "base/settings.h"
#include "base/tag.h"

enum { TMS_REGION_MAX_DEPTH = 64, TMS_REGION_LEFT_ON_OTHER_THREAD = 64 };
#define TMS_DEFAULT_TAG "default"

typedef struct tms_region_defaults {
    tms_tag_table_t tags;
    tms_region_t initial;     /* from the TMS_INIT_* variables */
    bool disabled;            /* no settings are managed (TMS_DISABLE) */
    bool own_handles;         /* every allocation has a handle of its own (TMS_RUNS=0) */
    _Atomic uint64_t last_id; /* of the last region entered, on any thread */
    /* The latest ids that were left on a thread without this region: the thread that has it finds that it has ended. */
    _Atomic uint64_t left_on_other_thread[TMS_REGION_LEFT_ON_OTHER_THREAD];
    _Atomic uint64_t left_on_other_thread_count;
} tms_region_defaults_t;

/* TMS_OUT_OF_HOST_MEMORY if the default tag cannot be created. */
tms_status_t tms_region_init(tms_region_defaults_t *defaults, const tms_config_t *config, tms_error_t *error);
void tms_region_release(tms_region_defaults_t *defaults);

/* The functions below act on the calling thread. At depth 0 are the initial settings, which are never left. */
/* Enters a region. *id becomes the id of the new innermost region, and is never 0. */
tms_status_t tms_region_enter(tms_region_defaults_t *defaults, const tms_region_settings_t *settings, bool follows,
                              uint64_t *id, tms_error_t *error);
/* Leaves that region only. Returns the number of later regions that stay, or TMS_NO_SUCH_REGION if this thread is in no
 * region with that id. If another thread is in it, it ends there, or as soon as that thread has left the regions inside. */
int tms_region_leave(tms_region_defaults_t *defaults, uint64_t id);
/* Ends the regions of a tag that follow another thread's, on all threads but the calling one. */
void tms_region_end_following(tms_region_defaults_t *defaults, const char *tag);
/* The innermost settings in force. *depth also counts regions that were ended and not left. */
tms_region_t tms_region_current(tms_region_defaults_t *defaults, int *depth); /* `depth` may be NULL */
/* Replaces the innermost settings, also those of a region that was ended, and puts them in force. At depth 0 that replaces
 * the initial settings, for this thread only. */
tms_status_t tms_region_set(tms_region_defaults_t *defaults, const tms_region_settings_t *settings, tms_error_t *error);

/* Checks a caller's settings and interns their tag. */
tms_status_t tms_region_from_settings(tms_region_defaults_t *defaults, const tms_region_settings_t *settings,
                                      tms_region_t *region, tms_error_t *error);

#endif
