/* Fork and exit. The handlers run on the thread that forks or exits.
 *
 * Two handlers are registered when the state is created: one with pthread_atfork, one with atexit. In a forked child
 * locks are reinitialised, and the parent's backup files and shared page forgotten. If the parent had loaded the driver, the
 * child's saver is marked `forked`: every call that would use the GPU fails with TMS_FORKED, and frees of the parent's
 * memory succeed and do nothing. Otherwise the child starts like any new process. At exit this process's backup files and
 * its shared page are unlinked. GPU memory is left to the driver, which may already be shutting down and releases it with
 * the process.
 */
#ifndef TMS_PROCESS_H
#define TMS_PROCESS_H

#include "abi/state.h"

/* How long exit waits for driver calls of the library's own threads. Unpinning memory waits for its device, where a kernel
 * may never end. A resume begun with wait=False may have much to copy, and the driver should not be shut down during it. */
#define TMS_EXIT_RELEASE_SECONDS 2.0
#define TMS_EXIT_RESUME_SECONDS  30.0

/* Ends the driver calls of the library's own threads, or stops waiting for them. Called at exit as early as possible, and
 * again by the atexit handler. */
void tms_process_end_threads(tms_saver_t *saver);

/* Called by a thread that has created the state, before it is published: so each fork that copies the state takes its locks.
 * A second registration does no harm. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_process_register(tms_error_t *error);

#endif
