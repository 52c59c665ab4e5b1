/* The C library's dlsym, which this library stands before.
 *
 * It is found by dlvsym, which this library does not stand before. Any thread, also before the constructors have run and
 * inside malloc. Owns one variable that is outside of the state, because there is no state that early: the address. Two
 * threads may look for it at once and find the same. */
#ifndef TMS_LOOKUPS_REAL_DLSYM_H
#define TMS_LOOKUPS_REAL_DLSYM_H

typedef void *(*tms_dlsym_t)(void *handle, const char *symbol);

/* Never NULL: where there is none, a function that finds nothing. */
tms_dlsym_t tms_real_dlsym(void);

#endif
