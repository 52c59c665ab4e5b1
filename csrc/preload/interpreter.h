/* The two uses of the Python interpreter of this process, if there is one: to install the code that is needed to send
 * managed tensors, and to release the GIL during a wait.
 *
 * With TMS_INIT_ENABLE a process may have managed memory although its program never imports the package: a worker that
 * inherits the environment. CUDA has no IPC handles for managed memory, so PyTorch cannot send its tensors until the package
 * has wrapped the function by which it describes a storage. The first managed allocation of the process therefore makes the
 * interpreter run torch_memory_saver/_engine/preloaded.py, which lies beside this library. Nothing happens without an
 * interpreter, without that file, or a second time.
 *
 * torch calls cudaMalloc with its allocator's mutex held, so the interpreter is not entered here. Two ways lead to it, and
 * the file may run on both: a pending call, which the main thread makes before its next Python call; and a thread of the
 * core, because the main thread may wait in C code for a long time. A forked child makes no call that its parent has asked
 * for: it cannot use the parent's memory.
 *
 * The functions of Python are looked up in the global scope. Any thread; no lock. */
#ifndef TMS_PRELOAD_INTERPRETER_H
#define TMS_PRELOAD_INTERPRETER_H

#include "abi/state.h"

/* Called after a managed allocation. Costs one atomic read, except for the first. */
void tms_interpreter_prepare_sharing(tms_state_t *state);

/* Releases the GIL if this thread holds it, and takes it again: for a wait that needs another thread to go on. */
typedef struct tms_interpreter_thread {
    void *state; /* NULL: the thread did not hold the GIL */
    void (*restore)(void *state);
} tms_interpreter_thread_t;
tms_interpreter_thread_t tms_interpreter_leave(void);
void tms_interpreter_return(tms_interpreter_thread_t thread);

#endif
