/* A tool as NVTX calls it: records what the library tells it. Linked into the tests in C; and compiled by the Python tests
 * as a library for NVTX_INJECTION64_PATH, which appends each line to the file $NVTX_RECORD.<pid>. Any thread. Without the
 * headers of NVTX nothing is recorded, nor in a test in C with old ones, whose injection without a library does not work.
 *
 * A line is "<thread> <what>": "domain NAME", "category NUMBER NAME", "register NAME", "push CATEGORY BYTES MESSAGE",
 * "mark CATEGORY BYTES MESSAGE", "pop". BYTES is "-" without a payload. MESSAGE has a * before it if it is a registered
 * string. */
#ifndef NVTX_RECORDER_H
#define NVTX_RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The function that NVTX calls first. A test in C has it called without a library, by a definition:
 *     int (*InitializeInjectionNvtx2_fnptr)(const void *(*)(uint32_t)) = InitializeInjectionNvtx2; */
int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t));

/* False if nothing can be recorded here. */
bool nvtx_recorder_can(void);
/* The lines since the last call, without their threads, in one text that the next call overwrites. */
const char *nvtx_recorder_take(void);
/* The number of threads in the lines that the last nvtx_recorder_take returned. */
size_t nvtx_recorder_threads(void);

#endif
