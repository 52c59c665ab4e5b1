/* Guards the key of the kernel that computes fingerprints: which modules have which key, and when they get it. */

#include "support.h"

#include <stdlib.h>
#include <string.h>

#include "device/fingerprinter.h"

enum { DEVICES = 2, BYTES = 4096 };
static const tms_error_context_t CONTEXT = {.operation = "test", .device = 0};

/* In pinned memory: one chunk, and its fingerprint. */
typedef struct pinned {
    tms_fingerprint_chunk_t chunk;
    tms_fingerprint_t result;
} pinned_t;

/* The fingerprint of `BYTES` bytes of 5 on a device. */
static tms_fingerprint_t launch(fixture_t *f, tms_fingerprinter_t *fingerprinter, int device) {
    tms_error_t error;
    CUdeviceptr memory = 0;
    CUstream stream = NULL;
    pinned_t *pinned = NULL;
    ASSERT_OK(tms_devices_enter(&f->devices, device, &CONTEXT, &error), error);
    assert_int_equal(f->cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    memory = allocate_on(f, device, "a", TMS_BACKUP_NONE, BYTES);
    memset((void *)(uintptr_t)memory, 5, BYTES);
    assert_int_equal(posix_memalign((void **)&pinned, BYTES, BYTES), 0);
    assert_int_equal(f->cuda->cuMemHostRegister(pinned, BYTES, 0), CUDA_SUCCESS);
    *pinned = (pinned_t){.chunk = {.address = memory, .bytes = BYTES}};
    ASSERT_OK(tms_fingerprinter_launch(fingerprinter, f->cuda, device, stream, &pinned->chunk, 1, &pinned->result, &CONTEXT,
                                       &error),
              error);
    assert_int_equal(f->cuda->cuStreamSynchronize(stream), CUDA_SUCCESS);
    const tms_fingerprint_t result = pinned->result;
    assert_int_equal(f->cuda->cuMemHostUnregister(pinned), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuStreamDestroy(stream), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, device);
    ASSERT_OK(tms_free_address(&f->saver, memory, &error), error);
    free(pinned);
    return result;
}

static bool are_equal(tms_fingerprint_t a, tms_fingerprint_t b) { return memcmp(&a, &b, sizeof a) == 0; }

static tms_fingerprint_key_t *make_key(uint32_t seed) {
    tms_fingerprint_key_t *key = malloc(sizeof *key);
    assert_non_null(key);
    fill((uint64_t)(uintptr_t)key, sizeof *key, seed);
    return key;
}

static void each_module_draws_a_key_until_one_is_set(void **state) {
    fixture_t *f = *state;
    tms_fingerprinter_t fingerprinter = {.key = NULL};
    const tms_fingerprint_t first = launch(f, &fingerprinter, 0), second = launch(f, &fingerprinter, 1);
    assert_false(are_equal(first, second));
    simulator()->clear_counts();
    assert_true(are_equal(launch(f, &fingerprinter, 0), first));
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 0); /* it has its key */
    tms_fingerprinter_release(&fingerprinter, &f->devices);
}

static void all_devices_have_the_key_that_is_set(void **state) {
    fixture_t *f = *state;
    tms_fingerprinter_t fingerprinter = {.key = NULL};
    tms_fingerprint_key_t *one = make_key(1), *other = make_key(2);
    const tms_fingerprint_t drawn = launch(f, &fingerprinter, 0); /* only this device has a module */
    tms_fingerprinter_set_key(&fingerprinter, one);
    simulator()->clear_counts();
    const tms_fingerprint_t of_one = launch(f, &fingerprinter, 0);
    assert_int_equal(simulator()->calls("cuModuleLoadData"), 0);
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 1);
    assert_false(are_equal(of_one, drawn));
    for (int device = 0; device < DEVICES; device++) assert_true(are_equal(launch(f, &fingerprinter, device), of_one));
    simulator()->clear_counts();
    (void)launch(f, &fingerprinter, 0);
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 0);
    tms_fingerprinter_set_key(&fingerprinter, other);
    const tms_fingerprint_t of_other = launch(f, &fingerprinter, 0);
    assert_false(are_equal(of_other, of_one));
    tms_fingerprinter_set_key(&fingerprinter, one); /* the second device never had the other */
    for (int device = 0; device < DEVICES; device++) assert_true(are_equal(launch(f, &fingerprinter, device), of_one));
    assert_int_equal(fingerprinter.keys, 3);
    tms_fingerprinter_release(&fingerprinter, &f->devices);
    free(one);
    free(other);
}

static void a_context_that_was_reset_gets_the_same_key(void **state) {
    fixture_t *f = *state;
    tms_fingerprinter_t fingerprinter = {.key = NULL};
    tms_fingerprint_key_t *key = make_key(1);
    tms_fingerprinter_set_key(&fingerprinter, key);
    const tms_fingerprint_t before = launch(f, &fingerprinter, 0);
    fingerprinter.modules[0].context++; /* as if the module belonged to an earlier context */
    assert_true(are_equal(launch(f, &fingerprinter, 0), before));
    tms_fingerprinter_release(&fingerprinter, &f->devices);
    free(key);
}

static void a_key_that_could_not_be_copied_is_copied_by_the_next_launch(void **state) {
    fixture_t *f = *state;
    tms_fingerprinter_t fingerprinter = {.key = NULL};
    tms_fingerprint_key_t *one = make_key(1), *other = make_key(2);
    tms_fingerprint_chunk_t chunk = {0};
    tms_fingerprint_t result;
    tms_error_t error;
    tms_fingerprinter_set_key(&fingerprinter, other);
    const tms_fingerprint_t of_other = launch(f, &fingerprinter, 0);
    tms_fingerprinter_set_key(&fingerprinter, one);
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
    simulator()->fail_after("cuMemcpyHtoDAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_fingerprinter_launch(&fingerprinter, f->cuda, 0, NULL, &chunk, 1, &result, &CONTEXT, &error),
                     TMS_DRIVER);
    tms_devices_leave(&f->devices, 0);
    const tms_fingerprint_t of_one = launch(f, &fingerprinter, 0);
    assert_false(are_equal(of_one, of_other));
    assert_true(are_equal(launch(f, &fingerprinter, 1), of_one));
    tms_fingerprinter_release(&fingerprinter, &f->devices);
    free(one);
    free(other);
}

#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TWO(each_module_draws_a_key_until_one_is_set),
        TWO(all_devices_have_the_key_that_is_set),
        TWO(a_context_that_was_reset_gets_the_same_key),
        TWO(a_key_that_could_not_be_copied_is_copied_by_the_next_launch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
