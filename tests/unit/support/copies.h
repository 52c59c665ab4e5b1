/* The pace of copies on the simulated GPU, for tests of what happens during copies. What a test then asserts must not depend
 * on how busy the machine is. */
#ifndef TMS_TEST_COPIES_H
#define TMS_TEST_COPIES_H

#include "support.h"

/* Copies that begin from here on end no sooner than release_copies(). */
void hold_copies(void);
void release_copies(void);

/* The same, but the saver's wait for the device with this number, counted from here on from 1, releases them before it
 * waits: what happens before that happens during the copies. A wait that is made to fail counts. Replaces functions in the
 * driver's table, which the next setup loads again. */
void hold_copies_until_wait(fixture_t *fixture, int number);

/* Calls that can be cancelled copy in chunks of this size, each of which takes longer than the interval between two calls of
 * `interrupted`, until release_copies(). So each wait for a chunk makes the next call of `interrupted` due, whatever else
 * the machine does. */
void copy_slowly(fixture_t *fixture, uint64_t chunk_bytes);

#endif
