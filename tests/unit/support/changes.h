/* For tests of pauses that copy only what has changed. */
#ifndef TMS_TEST_CHANGES_H
#define TMS_TEST_CHANGES_H

#include "include/tms_fingerprint.h"
#include "support.h"

enum { CHUNK = TMS_FINGERPRINT_CHUNK_BYTES, BYTES = 8 * CHUNK };

/* Every resume from now on keeps the contents of backups. */
void retain(fixture_t *f);
uint64_t allocate_filled(fixture_t *f, const char *tag, tms_backup_kind_t backup, uint64_t bytes, uint32_t seed);
/* Pauses everything, and asserts how many bytes were copied and how many were not. */
void pause_copying(fixture_t *f, uint64_t copied, uint64_t unchanged);
void resume(fixture_t *f);
/* pause_copying and resume. */
void cycle_copying(fixture_t *f, uint64_t copied, uint64_t unchanged);
void add_one(uint64_t address);
void subtract_one(uint64_t address);

/* The last progress of a call. `wrong`: it was more than the total, or less than before. */
typedef struct progress {
    uint64_t calls, done, total;
    bool wrong;
} progress_t;
void note_progress(void *context, uint64_t done, uint64_t total);
/* Replaces the kernel by one that gives all contents the same fingerprint, and by one that writes no fingerprint. */
void launch_equal(fixture_t *f);
void launch_nothing(fixture_t *f);
/* Pauses and resumes everything. Asserts what was copied, and that the progress of both calls is right at any time and
 * complete at the end. */
void cycle_with_progress(fixture_t *f, uint64_t copied, uint64_t unchanged);

/* What is live, for pauses that ask. */
typedef struct knowledge {
    uint64_t addresses[2]; /* sorted; the second may be 0 */
    tms_live_range_t ranges[4];
    size_t count;
} knowledge_t;
int32_t tell(void *context, tms_live_t *live);
void pause_live(fixture_t *f, knowledge_t *known, uint64_t copied, uint64_t unchanged);

#endif
