/* NVTX ranges of pauses and resumes, for tools such as Nsight Systems.
 *
 * Owns the NVTX domain "torch_memory_saver", its registered strings and its categories. nvtx.c is the only file that
 * includes nvtx3, a header-only library of the CUDA toolkit. It defines hidden variables there, through which it calls the
 * tool: the only globals of the core besides the state. If the build found no nvtx3, no tool is ever called.
 *
 * Independent of the event ring. NVTX looks for a tool (NVTX_INJECTION64_PATH) at the first call, and loads it: never at
 * import. Without a tool tms_nvtx_attach returns NULL, and callers test that pointer before each range.
 *
 * Any thread, with no lock held: code of the tool runs. A range belongs to the thread that pushed it, which must pop it.
 * Nothing is called in a forked child whose parent looked for a tool: its locks and threads are the parent's. */
#ifndef TMS_NVTX_H
#define TMS_NVTX_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "include/tms.h"

/* Whether this build has nvtx3. */
#define TMS_NVTX_IS_BUILT 0
#ifdef __has_include
#if __has_include(<nvtx3/nvToolsExt.h>)
#undef TMS_NVTX_IS_BUILT
#define TMS_NVTX_IS_BUILT 1
#endif
#endif

enum {
    TMS_NVTX_PHASES = 0
#define TMS_NVTX_ONE(phase, number, name) +1
    TMS_EVENT_PHASES(TMS_NVTX_ONE)
#undef TMS_NVTX_ONE
};

/* Zero at the start. */
typedef struct tms_nvtx {
    _Atomic bool asked;            /* a call has looked for a tool, or is about to */
    _Atomic(void *) domain;        /* NULL: no tool */
    void *phases[TMS_NVTX_PHASES]; /* registered names; constant once `domain` is set */
} tms_nvtx_t;

/* Looks for a tool at the first call. Returns `nvtx`, or NULL if there is no tool or if another thread is looking for
 * one. */
tms_nvtx_t *tms_nvtx_attach(tms_nvtx_t *nvtx);
void tms_nvtx_after_fork_in_child(tms_nvtx_t *nvtx);

/* Begins the range of a whole call, named by its operation and its tags (NULL: all). */
void tms_nvtx_push_call(tms_nvtx_t *nvtx, const char *operation, const char *const *tags, size_t tag_count);
/* Begins the range of a phase. `bytes` is its payload; 0: none. */
void tms_nvtx_push(tms_nvtx_t *nvtx, tms_event_phase_t phase, uint64_t bytes);
/* Ends this thread's latest range. */
void tms_nvtx_pop(tms_nvtx_t *nvtx);
/* Marks the result of the call: "moved" with the bytes, or "failed: " with the name of the status. */
void tms_nvtx_mark(tms_nvtx_t *nvtx, tms_status_t status, uint64_t bytes);

#endif
