/* The library's own threads. They block all signals, because the program's handlers may expect to run on its own threads.
 * Any thread may start one. No lock. */
#ifndef TMS_THREAD_H
#define TMS_THREAD_H

#include <pthread.h>

/* pthread_create; 0 or the error number. */
int tms_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
