/* Host buffers: counted, given back by the last reference, kept where that is refused, and the parent's in a forked child.
 */

#include "support.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const tms_error_context_t CONTEXT = {.operation = "pause", .device = 0, .tag = "weights"};

/* munmap of one address fails so many times. The simulated GPU calls this one as well. */
static struct {
    void *address;
    int failures;
} fault;

int munmap(void *address, size_t bytes) {
    if (address == fault.address && fault.failures > 0) {
        fault.failures--;
        errno = ENOMEM;
        return -1;
    }
    return (int)syscall(SYS_munmap, address, bytes);
}

static tms_host_buffer_t *create(fixture_t *f, tms_backup_kind_t kind, uint64_t bytes) {
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    ASSERT_OK(tms_host_buffer_create(&buffer, kind, bytes, &f->saver.stores, &CONTEXT, &error), error);
    return buffer;
}

static uint64_t held(const fixture_t *f) { return tms_quarantine_held(&f->saver.quarantine, TMS_QUARANTINE_HOST); }

static uint64_t pinned_bytes(void) {
    tms_sim_usage_t usage;
    simulator()->usage(0, &usage);
    return usage.host_bytes;
}

static bool is_mapped(void *memory) {
    unsigned char resident;
    return mincore(memory, 1, &resident) == 0;
}

static void the_last_reference_gives_it_back(void **state) {
    fixture_t *f = *state;
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP};
    for (size_t i = 0; i < 2; i++) {
        tms_host_buffer_t *buffer = create(f, kinds[i], 5000);
        void *memory = buffer->memory;
        memset(memory, 1, 5000);
        assert_int_equal(atomic_load(&f->saver.stores.host_bytes), kinds[i] == TMS_BACKUP_MMAP ? 8192 : 5000);
        tms_host_buffer_acquire(buffer);
        tms_host_buffer_drop(buffer);
        assert_true(is_mapped(memory));
        tms_host_buffer_drop(buffer);
        assert_int_equal(atomic_load(&f->saver.stores.host_bytes), 0);
        assert_int_equal(pinned_bytes(), 0);
        if (kinds[i] == TMS_BACKUP_MMAP) assert_false(is_mapped(memory));
    }
    tms_host_buffer_drop(NULL);
}

static void pinned_memory_that_is_refused_is_given_back_later(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemFreeHost", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuDevicePrimaryCtxGetState"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_host_buffer_t *buffer = create(f, TMS_BACKUP_PINNED, MIB);
        simulator()->fail_after(calls[i], 0, 2, CUDA_ERROR_UNKNOWN);
        tms_host_buffer_drop(buffer);
        assert_int_equal(atomic_load(&f->saver.stores.host_bytes), 0); /* it is no backup any more */
        assert_int_equal(pinned_bytes(), MIB);
        assert_int_equal(held(f), 1);
        tms_saver_reclaim(&f->saver);
        assert_int_equal(held(f), 1);
        tms_saver_reclaim(&f->saver);
        assert_int_equal(held(f), 0);
        assert_int_equal(pinned_bytes(), 0);
    }
}

static void mapped_memory_that_is_refused_is_emptied_and_given_back_later(void **state) {
    fixture_t *f = *state;
    tms_host_buffer_t *buffer = create(f, TMS_BACKUP_MMAP, MIB);
    unsigned char *memory = buffer->memory, resident = 1;
    memset(memory, 1, MIB);
    fault.address = memory;
    fault.failures = 2;
    tms_host_buffer_drop(buffer);
    assert_int_equal(held(f), 1);
    assert_int_equal(mincore(memory, 1, &resident), 0);
    assert_int_equal(resident & 1, 0); /* the pages have gone, the addresses have not */
    tms_saver_reclaim(&f->saver);
    assert_int_equal(held(f), 1);
    tms_saver_reclaim(&f->saver);
    assert_int_equal(held(f), 0);
    assert_false(is_mapped(memory));
}

static void a_driver_that_has_gone_keeps_nothing(void **state) {
    fixture_t *f = *state;
    tms_host_buffer_t *buffer = create(f, TMS_BACKUP_PINNED, MIB);
    void *memory = buffer->memory;
    simulator()->fail_after("cuMemFreeHost", 0, 1, CUDA_ERROR_DEINITIALIZED);
    tms_host_buffer_drop(buffer);
    assert_int_equal(held(f), 0);
    /* It said so only for the test. */
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
    assert_int_equal(f->cuda->cuMemFreeHost(memory), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
}

static void creating_one_fails_cleanly(void **state) {
    fixture_t *f = *state;
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    simulator()->fail_after("cuMemHostAlloc", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(tms_host_buffer_create(&buffer, TMS_BACKUP_PINNED, MIB, &f->saver.stores, &CONTEXT, &error),
                     TMS_OUT_OF_HOST_MEMORY);
    assert_null(buffer);
    assert_string_equal(error.tag, "weights");
    assert_int_equal(tms_host_buffer_create(&buffer, TMS_BACKUP_MMAP, (uint64_t)1 << 62, &f->saver.stores, &CONTEXT, &error),
                     TMS_OUT_OF_HOST_MEMORY);
    assert_string_equal(error.call, "mmap");
    assert_null(buffer);
    assert_int_equal(atomic_load(&f->saver.stores.host_bytes), 0);
}

/* Mapped buffers are not in the child; something else may be, at the same address. */
static void a_forked_child_touches_nothing(void **state) {
    fixture_t *f = *state;
    tms_host_buffer_t *mapped = create(f, TMS_BACKUP_MMAP, MIB), *pinned = create(f, TMS_BACKUP_PINNED, MIB);
    memset(mapped->memory, 1, MIB);
    pid_t child = fork();
    if (child == 0) {
        unsigned char *memory = mapped->memory;
        void *own = mmap(memory, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (own != memory) _exit(2);
        memory[0] = 42;
        uint64_t calls = simulator()->calls("cuMemFreeHost");
        tms_host_buffer_drop(mapped);
        tms_host_buffer_drop(pinned);
        if (!is_mapped(memory) || memory[0] != 42) _exit(3);
        _exit(simulator()->calls("cuMemFreeHost") == calls ? 0 : 4);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(((unsigned char *)mapped->memory)[MIB - 1], 1);
    tms_host_buffer_drop(mapped);
    tms_host_buffer_drop(pinned);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_last_reference_gives_it_back),
        TEST(pinned_memory_that_is_refused_is_given_back_later),
        TEST(mapped_memory_that_is_refused_is_emptied_and_given_back_later),
        TEST(a_driver_that_has_gone_keeps_nothing),
        TEST(creating_one_fails_cleanly),
        TEST(a_forked_child_touches_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
