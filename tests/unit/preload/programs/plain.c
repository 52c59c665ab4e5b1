/* A program without CUDA, which can also be linked statically. Threads still run while it exits. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static void *work_for_ever(void *argument) {
    (void)argument;
    for (;;) free(malloc(64));
    return NULL;
}

int main(void) {
    enum { THREADS = 3, EXIT_STATUS = 5 };
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work_for_ever, NULL) != 0) return 1;
    }
    printf("on standard output\n");
    fprintf(stderr, "on standard error\n");
    return EXIT_STATUS;
}
