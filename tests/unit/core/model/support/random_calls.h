/* Random allocations, frees, pauses and resumes of three tags on two devices, for tests that compare two views of them. */
#ifndef TMS_TESTS_RANDOM_CALLS_H
#define TMS_TESTS_RANDOM_CALLS_H

#include "support.h"

enum { TAGS = 3, DEVICES = 2, SEGMENTS = 12 };

static const char *const tags[TAGS] = {"weights", "kv_cache", "graphs"};

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 16;
}

/* Makes one call. `addresses` has what is allocated, and 0 where nothing is. */
static void act(fixture_t *f, uint32_t *random, uint64_t *addresses) {
    static const tms_backup_kind_t backups[] = {TMS_BACKUP_NONE, TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
    tms_error_t error;
    const uint32_t slot = next_random(random) % SEGMENTS, what = next_random(random) % 5;
    const char *tag = next_random(random) % 4 ? tags[next_random(random) % TAGS] : NULL;
    if (what == 0) {
        ASSERT_OK(pause_tag(f, tag, &error), error);
    } else if (what == 1) {
        ASSERT_OK(resume_tag(f, tag, &error), error);
    } else if (what == 2) {
        const tms_selection_t selection = {.tags = tag ? &tag : NULL, .tag_count = tag != NULL, .has_backup = 1};
        ASSERT_OK(pause_selected(f, &selection, &error), error); /* discards the backups of what is paused */
    } else if (addresses[slot]) {
        ASSERT_OK(tms_free_address(&f->saver, addresses[slot], &error), error);
        addresses[slot] = 0;
    } else {
        addresses[slot] = allocate_on(f, (int)(next_random(random) % DEVICES), tags[slot % TAGS], backups[slot % 4],
                                      (1 + next_random(random) % 3) * 2 * MIB);
    }
}

#endif
