/* Finds the loaded object (a library or the program) that contains an address of code.
 *
 * Owns the paths of all objects that were ever found, which stay valid for ever, and a cache of their addresses. The cache
 * is valid until an object is unloaded, which the loader counts.
 *
 * dladdr is not used, because it takes the loader's main lock, which a thread that loads a library holds while the
 * constructors of that library run. dl_iterate_phdr takes the lock of the loader's list of objects, which is held for
 * moments only.
 *
 * No lock of its own. The functions that ask the loader are called on any thread with no lock of this library held. The
 * others are called under the lock of the struct's owner. */
#ifndef TMS_CALLERS_H
#define TMS_CALLERS_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TMS_NO_CALLER = -1 };

typedef struct tms_caller_range {
    uintptr_t begin, end; /* [begin, end) */
    int32_t caller;
} tms_caller_range_t;

typedef struct tms_callers {
    char **paths; /* indexed by the number of the caller */
    size_t count, capacity;
    tms_caller_range_t *ranges;
    size_t range_count, range_capacity;
    uint64_t unloads; /* number of objects that had been unloaded when `ranges` were found */
} tms_callers_t;

/* An object as the loader knows it. */
typedef struct tms_caller_object {
    uintptr_t begin, end; /* both 0: the address lies in no object, like code made at run time */
    uint64_t unloads;
    char path[PATH_MAX]; /* "" where begin is 0 */
} tms_caller_object_t;

void tms_callers_init(tms_callers_t *callers);
void tms_callers_release(tms_callers_t *callers);

/* Returns the number of objects that have been unloaded. Asks the loader. */
uint64_t tms_callers_unloads(void);
/* Finds the object that contains an address. Asks the loader. */
void tms_caller_find(uintptr_t address, tms_caller_object_t *object);

/* Returns the number of the caller that is known to contain an address, or TMS_NO_CALLER. Under the owner's lock. */
int32_t tms_callers_cached(const tms_callers_t *callers, uintptr_t address, uint64_t unloads);
/* Returns the number of the caller with the object's path, and remembers its addresses. Returns TMS_NO_CALLER if memory is
 * short. Under the owner's lock. */
int32_t tms_callers_remember(tms_callers_t *callers, const tms_caller_object_t *object);
/* Returns the path of a caller, which is valid for ever. Under the owner's lock. */
const char *tms_callers_path(const tms_callers_t *callers, int32_t caller);

#endif
