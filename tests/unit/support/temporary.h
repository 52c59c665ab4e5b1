/* A directory of a test's own, below TMPDIR. */
#ifndef TMS_TEST_TEMPORARY_H
#define TMS_TEST_TEMPORARY_H

enum { TEMPORARY_BYTES = 256 };

/* Makes one with `name` in its name and says in `path` where; NULL where that failed. Removing it takes along what is in it.
 */
char *make_temporary_directory(char path[TEMPORARY_BYTES], const char *name);
int remove_temporary_directory(const char *path);

#endif
