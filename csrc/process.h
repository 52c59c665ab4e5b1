/* Fork and exit.
 *
 * Registered once, when the state is made: a pthread_atfork handler and an atexit handler. In a forked child locks are made
 * anew and the parent's backup files forgotten. Where the parent had loaded the driver, the child's saver is marked `forked`
 * (every call that would touch the GPU then fails with TMS_FORKED, frees of the parent's memory succeed and do nothing);
 * where it had not, the child starts like any new process. At exit this process's backup files are
 * unlinked; GPU memory is left to the driver, which takes it back with the process, because it may already be shutting down.
 */
#ifndef TMS_PROCESS_H
#define TMS_PROCESS_H

#include "state.h"

/* Called once, by the thread that has just published the state. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_process_register(tms_error_t *error);

#endif
