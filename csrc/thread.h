/* Threads of the library's own. The program's signals are for its own threads, whose handlers may rely on running there, so
 * these block all of them. */
#ifndef TMS_THREAD_H
#define TMS_THREAD_H

#include <pthread.h>

/* pthread_create; 0 or the error number. */
int tms_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
