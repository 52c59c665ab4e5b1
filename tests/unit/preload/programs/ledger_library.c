/* A library that allocates device memory, for ledger.c: compiled more than once, under several names. */

#include <pthread.h>
#include <stdlib.h>

#include "support.h"

/* The result is used after the call, so that it is no jump whose return address is the caller's. */
int library_allocate(void **address, size_t bytes) {
    int result = cudaMalloc(address, bytes);
    return result == SUCCESS && *address ? SUCCESS : INVALID_VALUE;
}

int library_free(void *address) { return cudaFree(address) == SUCCESS ? SUCCESS : INVALID_VALUE; }

static void *allocate_and_free(void *unused) {
    void *address = NULL;
    (void)unused;
    EQUAL(library_allocate(&address, MIB), SUCCESS);
    EQUAL(library_free(address), SUCCESS);
    return NULL;
}

/* The loader holds its main lock here. */
__attribute__((constructor)) static void constructed(void) {
    pthread_t thread;
    if (!getenv("ALLOCATE_IN_CONSTRUCTOR")) return;
    EQUAL(pthread_create(&thread, NULL, allocate_and_free, NULL), 0);
    EQUAL(pthread_join(thread, NULL), 0);
}
