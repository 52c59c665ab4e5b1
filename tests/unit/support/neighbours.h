/* Segments that lie side by side, for the tests of runs. Includes of a test: support.h first. */
#ifndef TMS_TEST_NEIGHBOURS_H
#define TMS_TEST_NEIGHBOURS_H

#include "support.h"

enum { NEIGHBOURS = 4 };
#define NEIGHBOUR_BYTES (2 * MIB)

/* NEIGHBOURS segments of one tag with consecutive addresses, each with a handle of its own. The address range before theirs
 * is given back: ranges grow, and the first ones hold one segment. */
void make_neighbours(fixture_t *fixture, const char *tag, tms_backup_kind_t backup, uint64_t *addresses);
/* The same, paused and resumed: one run of NEIGHBOURS segments, each filled with its number. */
void make_run(fixture_t *fixture, const char *tag, tms_backup_kind_t backup, uint64_t *addresses);

tms_run_t *run_at(fixture_t *fixture, uint64_t address);
uint64_t slack_bytes(fixture_t *fixture);
void free_at(fixture_t *fixture, uint64_t address);

#endif
