/* Calls the interposers in a process without any CUDA runtime: a clear error, and the process continues. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "include/tms.h"

enum { SYMBOL_NOT_FOUND = 302 };

static void *stream = &stream, *graph;

static void *find(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found) exit(2);
    return found;
}
#define HOOK(name, parameters) ((int(*) parameters)find(name))

static void check(int line, int result) {
    if (result == SYMBOL_NOT_FOUND) return;
    fprintf(stderr, "line %d: %d\n", line, result);
    exit(1);
}
#define FAILS(call) check(__LINE__, call)

static void memory(void) {
    void *address = NULL;
    for (int i = 0; i < 3; i++) {
        FAILS(HOOK("cudaMalloc", (void **, size_t))(&address, 1 << 20));
        FAILS(HOOK("cudaFree", (void *))((void *)0x1000));
        FAILS(HOOK("cudaFree", (void *))(NULL));
        if (address) exit(1);
    }
    FAILS(HOOK("cudaDeviceEnablePeerAccess", (int, unsigned))(1, 0));
    FAILS(HOOK("cudaIpcGetMemHandle", (void *, void *))(NULL, NULL));
    FAILS(HOOK("cudaDeviceReset", (void))());
    FAILS(HOOK("cudaMallocAsync", (void **, size_t, void *))(&address, 1 << 20, stream));
    FAILS(HOOK("cudaFreeAsync", (void *, void *))((void *)0x1000, stream));
    FAILS(HOOK("cuMemAlloc_v2", (void **, size_t))(&address, 1 << 20));
    FAILS(HOOK("cuMemFree_v2", (void *))((void *)0x1000));
    FAILS(HOOK("cuMemCreate", (void **, size_t, const void *, unsigned long long))(&address, 1 << 20, NULL, 0));
    FAILS(HOOK("cuMemRelease", (void *))((void *)0x1000));
    FAILS(HOOK("cuMemUnmap", (void *, size_t))((void *)0x1000, 1 << 20));
    if (address) exit(1);
}

/* No announced capture stays behind. */
static void captures(void) {
    tms_counters_t counters;
    FAILS(HOOK("cudaStreamBeginCapture", (void *, int))(stream, 2));
    FAILS(HOOK("cudaStreamBeginCapture_ptsz", (void *, int))(stream, 2));
    FAILS(HOOK("cudaStreamBeginCaptureToGraph",
               (void *, void *, const void *, const void *, size_t, int))(stream, graph, NULL, NULL, 0, 2));
    FAILS(HOOK("cudaStreamBeginCaptureToGraph_ptsz",
               (void *, void *, const void *, const void *, size_t, int))(stream, graph, NULL, NULL, 0, 2));
    FAILS(HOOK("cudaStreamEndCapture", (void *, void **))(stream, &graph));
    FAILS(HOOK("cudaStreamEndCapture_ptsz", (void *, void **))(stream, &graph));
    FAILS(HOOK("cudaStreamDestroy", (void *))(stream));
    ((__typeof__(&tms_get_api))find("tms_get_api"))(TMS_INTERFACE)->counters(&counters);
    if (counters.visible_captures) exit(1);
}

int main(int argc, char **argv) {
    (void)argv;
    if (argc > 1)
        captures();
    else
        memory();
    printf("done\n");
    return 0;
}
