/* The library's own threads. They block all signals, because handlers of the program may rely on running on its threads.
 * Any thread may start one; no lock. */
#ifndef TMS_THREAD_H
#define TMS_THREAD_H

#include <pthread.h>

/* pthread_create; 0 or the error number. */
int tms_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
