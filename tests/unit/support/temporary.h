/* A directory for one test, below TMPDIR. */
#ifndef TMS_TEST_TEMPORARY_H
#define TMS_TEST_TEMPORARY_H

enum { TEMPORARY_BYTES = 256 };

/* Creates one with `name` in its name and writes its path to `path`; NULL on failure. Removing it removes its contents. */
char *make_temporary_directory(char path[TEMPORARY_BYTES], const char *name);
int remove_temporary_directory(const char *path);

#endif
