/* Finds the file that a loaded library came from. Owns nothing; any thread, no lock. Not for the interposed functions,
 * because dladdr takes the loader's lock. */
#ifndef TMS_LIBRARY_PATH_H
#define TMS_LIBRARY_PATH_H

#include <limits.h>
#include <stdbool.h>

/* Writes the absolute path of the library that contains `address`. The loader's own name of a library may be relative (from
 * LD_PRELOAD), and names another file once the program has changed its working directory. The kernel's name is read then.
 * Returns false if there is none, as after the file was removed. */
bool tms_library_path(const void *address, char path[PATH_MAX]);

#endif
