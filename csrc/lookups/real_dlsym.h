/* The C library's dlsym, which this library interposes.
 *
 * It is found by dlvsym, which this library does not interpose. Any thread, even before the constructors have run and inside
 * malloc. Owns one variable that is outside of the state, because there is no state that early: the address. Two threads may
 * look for it at once and find the same. */
#ifndef TMS_LOOKUPS_REAL_DLSYM_H
#define TMS_LOOKUPS_REAL_DLSYM_H

typedef void *(*tms_dlsym_t)(void *handle, const char *symbol);

/* Never returns NULL: if there is no dlsym, returns a function that finds nothing. */
tms_dlsym_t tms_real_dlsym(void);

#endif
