/* Fork and exit.
 *
 * Registered once, when the state is made: a pthread_atfork handler and an atexit handler. In a forked child locks are made
 * anew and the parent's backup files forgotten. Where the parent had loaded the driver, the child's saver is marked `forked`
 * (every call that would use the GPU then fails with TMS_FORKED, frees of the parent's memory succeed and do nothing);
 * where it had not, the child starts like any new process. At exit this process's backup files are
 * unlinked; GPU memory is left to the driver, which takes it back with the process, because it may already be shutting down.
 */
#ifndef TMS_PROCESS_H
#define TMS_PROCESS_H

#include "abi/state.h"

/* How long the end of the process waits for what the library's own threads do with the driver. Giving pinned memory back
 * waits for its device, where a kernel may never end; a resume that was begun with wait=False may have much to copy, and the
 * driver should not be shut down during it. */
#define TMS_EXIT_RELEASE_SECONDS 2.0
#define TMS_EXIT_RESUME_SECONDS  30.0

/* At exit, as early as it is known: ends what the library's own threads do with the driver, or gives up waiting for that.
 * The handler of the C library's exit does it again. */
void tms_process_end_threads(tms_saver_t *saver);

/* Called once, by the thread that has just published the state. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_process_register(tms_error_t *error);

#endif
