/* Two threads capture, each on its own default stream. Both streams have the same handle: NULL, or the number for it. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "include/tms.h"

int cudaStreamBeginCapture_ptsz(void *stream, int mode);
int cudaStreamEndCapture_ptsz(void *stream, void **graph);

static pthread_barrier_t barrier;

static void check_captures(uint64_t expected) {
    const tms_api_t *(*get_api)(uint32_t) = NULL;
    tms_counters_t counters;
    *(void **)&get_api = dlsym(RTLD_DEFAULT, "tms_get_api");
    get_api(TMS_INTERFACE)->counters(&counters);
    if (counters.visible_captures == expected) return;
    fprintf(stderr, "%d captures, not %d\n", (int)counters.visible_captures, (int)expected);
    exit(1);
}

static void *second_thread(void *argument) {
    void *graph = NULL;
    pthread_barrier_wait(&barrier);
    if (cudaStreamBeginCapture_ptsz(NULL, 0) != 0) exit(1);
    check_captures(2);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    if (cudaStreamEndCapture_ptsz(NULL, &graph) != 0) exit(1);
    check_captures(0);
    return argument;
}

int main(void) {
    void *const per_thread = (void *)2, *graph = NULL;
    pthread_t thread;
    if (pthread_barrier_init(&barrier, NULL, 2) != 0) return 1;
    if (pthread_create(&thread, NULL, second_thread, NULL) != 0) return 1;
    if (cudaStreamBeginCapture_ptsz(NULL, 0) != 0) return 1;
    check_captures(1);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    if (cudaStreamEndCapture_ptsz(per_thread, &graph) != 0) return 1; /* the same stream as NULL */
    check_captures(1);
    pthread_barrier_wait(&barrier);
    if (pthread_join(thread, NULL) != 0) return 1;
    printf("done\n");
    return 0;
}
