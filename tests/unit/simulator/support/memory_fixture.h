/* Shared by the tests of the simulated GPU's memory. */
#ifndef TMS_TESTS_MEMORY_FIXTURE_H
#define TMS_TESTS_MEMORY_FIXTURE_H

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated_cuda.h"

/* Whether the host may read an address. The kernel is asked, so that the test does not fault. */
static bool is_readable(CUdeviceptr address) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    bool readable = write(ends[1], (const void *)(uintptr_t)address, 1) == 1;
    if (!readable) assert_int_equal(errno, EFAULT);
    close(ends[0]);
    close(ends[1]);
    return readable;
}

/* Also called by the simulator. */
static _Atomic int searches;
__attribute__((visibility("default"))) off_t lseek(int file, off_t offset, int whence) {
    atomic_fetch_add(&searches, 1);
    return ((__typeof__(&lseek))dlsym(RTLD_NEXT, "lseek"))(file, offset, whence);
}

#endif
