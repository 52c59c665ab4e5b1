/* Guards status.c: names, the meaning of driver results, and the format of messages. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <cuda.h>

#include "base/status.h"

static void assert_contains(const char *text, const char *part) {
    if (!strstr(text, part)) fail_msg("'%s' is not in '%s'", part, text);
}

static void test_every_status_has_a_name_and_a_text(void **state) {
    (void)state;
#define CHECK(name, number, text)                                                                                           \
    assert_int_equal(TMS_##name, number);                                                                                   \
    assert_string_equal(tms_status_name(TMS_##name), #name);                                                                \
    assert_string_equal(tms_status_text(TMS_##name), text);
    TMS_STATUS_CODES(CHECK)
#undef CHECK
    assert_string_equal(tms_status_name((tms_status_t)999), "UNKNOWN");
    assert_non_null(tms_status_text((tms_status_t)999));
}

static void test_driver_results_map_to_statuses(void **state) {
    (void)state;
    static const struct {
        int result;
        tms_status_t status;
    } cases[] = {
        {CUDA_SUCCESS, TMS_OK},
        {CUDA_ERROR_INVALID_VALUE, TMS_DRIVER},
        {CUDA_ERROR_OUT_OF_MEMORY, TMS_OUT_OF_DEVICE_MEMORY},
        {CUDA_ERROR_NOT_PERMITTED, TMS_INVALID_STATE},
        {CUDA_ERROR_NOT_INITIALIZED, TMS_DRIVER_UNAVAILABLE},
        {CUDA_ERROR_DEINITIALIZED, TMS_DRIVER_UNAVAILABLE},
        {CUDA_ERROR_STUB_LIBRARY, TMS_DRIVER_UNAVAILABLE},
        {CUDA_ERROR_NO_DEVICE, TMS_DRIVER_UNAVAILABLE},
        {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, TMS_DRIVER_UNAVAILABLE},
        {CUDA_ERROR_SYSTEM_NOT_READY, TMS_DRIVER_UNAVAILABLE},
        {CUDA_ERROR_INVALID_DEVICE, TMS_DRIVER},
        {CUDA_ERROR_INVALID_CONTEXT, TMS_DRIVER},
        {CUDA_ERROR_CONTEXT_IS_DESTROYED, TMS_DRIVER},
        {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, TMS_DRIVER},
        {CUDA_ERROR_ECC_UNCORRECTABLE, TMS_DEVICE_LOST},
        {CUDA_ERROR_NVLINK_UNCORRECTABLE, TMS_DEVICE_LOST},
        {226, TMS_DEVICE_LOST},
        {CUDA_ERROR_ILLEGAL_ADDRESS, TMS_DEVICE_LOST},
        {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, TMS_DRIVER},
        {CUDA_ERROR_LAUNCH_TIMEOUT, TMS_DEVICE_LOST},
        {CUDA_ERROR_ASSERT, TMS_DEVICE_LOST},
        {CUDA_ERROR_HARDWARE_STACK_ERROR, TMS_DEVICE_LOST},
        {CUDA_ERROR_ILLEGAL_INSTRUCTION, TMS_DEVICE_LOST},
        {CUDA_ERROR_MISALIGNED_ADDRESS, TMS_DEVICE_LOST},
        {CUDA_ERROR_INVALID_ADDRESS_SPACE, TMS_DEVICE_LOST},
        {CUDA_ERROR_INVALID_PC, TMS_DEVICE_LOST},
        {CUDA_ERROR_LAUNCH_FAILED, TMS_DEVICE_LOST},
        {CUDA_ERROR_NOT_SUPPORTED, TMS_DRIVER},
        {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, TMS_CAPTURE_IN_PROGRESS},
        {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, TMS_CAPTURE_IN_PROGRESS},
        {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, TMS_CAPTURE_IN_PROGRESS},
        {CUDA_ERROR_TIMEOUT, TMS_DRIVER},
        {CUDA_ERROR_UNKNOWN, TMS_DRIVER},
        {-1, TMS_DRIVER},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (tms_status_from_driver(cases[i].result) != cases[i].status) {
            fail_msg("result %d is %s", cases[i].result, tms_status_name(tms_status_from_driver(cases[i].result)));
        }
    }
}

static void test_clear(void **state) {
    (void)state;
    tms_error_t error;
    memset(&error, 0x5A, sizeof(error));
    tms_error_clear(&error);
    assert_int_equal(error.status, TMS_OK);
    assert_int_equal(error.device, TMS_NO_DEVICE);
    assert_int_equal(error.bytes, 0);
    assert_string_equal(error.message, "");
    assert_string_equal(error.tag, "");
    tms_error_clear(NULL);
}

static void test_a_driver_error_names_every_detail(void **state) {
    (void)state;
    const tms_error_context_t context = {
        .operation = "resume", .device = 3, .bytes = 2097152, .address = 0x7f0000200000, .tag = "kv_cache"};
    tms_error_t error;
    memset(&error, 0x5A, sizeof(error));
    assert_int_equal(tms_error_set_driver(&error, &context, "cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
                     TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(error.status, TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(error.driver_result, 2);
    assert_int_equal(error.os_error, 0);
    assert_int_equal(error.device, 3);
    assert_int_equal(error.bytes, 2097152);
    assert_int_equal(error.address, 0x7f0000200000);
    assert_string_equal(error.operation, "resume");
    assert_string_equal(error.call, "cuMemCreate");
    assert_string_equal(error.result_name, "CUDA_ERROR_OUT_OF_MEMORY");
    assert_string_equal(error.tag, "kv_cache");
    const char *expected =
        "resume: the device has too little free memory; cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2): 2.0 MiB, "
        "device 3, address 0x7f0000200000, tag 'kv_cache'. Pause other tags";
    assert_true(strlen(error.message) > strlen(expected));
    assert_memory_equal(error.message, expected, strlen(expected));
}

static void test_unknown_details_are_omitted(void **state) {
    (void)state;
    const tms_error_context_t context = {.operation = "free", .device = TMS_NO_DEVICE};
    tms_error_t error;
    assert_int_equal(tms_error_set_driver(&error, &context, "cuMemUnmap", 1, NULL), TMS_DRIVER);
    assert_string_equal(error.result_name, "");
    assert_string_equal(error.message, "free: a CUDA driver call failed; cuMemUnmap failed with an unnamed error (1).");
    assert_int_equal(tms_error_set(&error, TMS_INVALID_ARGUMENT, NULL, "the %s is %d", "size", -1), TMS_INVALID_ARGUMENT);
    assert_int_equal(error.device, TMS_NO_DEVICE);
    assert_string_equal(error.message, "an argument has a value that the operation does not take: the size is -1.");
}

static void test_sizes_are_readable(void **state) {
    (void)state;
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {
        {1, ": 1 bytes, device 0; detail?"},
        {1023, ": 1023 bytes, device 0; detail?"},
        {1024, ": 1.0 KiB, device 0; detail?"},
        {3u << 19, ": 1.5 MiB, device 0; detail?"},
        {UINT64_C(15) << 30, ": 15.0 GiB, device 0; detail?"},
        {UINT64_MAX, ": 16.0 EiB, device 0; detail?"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const tms_error_context_t context = {.operation = "allocate", .bytes = cases[i].bytes};
        tms_error_t error;
        tms_error_set(&error, TMS_DRIVER, &context, "detail?");
        assert_contains(error.message, cases[i].text);
        assert_int_equal(error.bytes, cases[i].bytes);
    }
}

static void test_each_status_names_a_remedy(void **state) {
    (void)state;
    static const struct {
        tms_status_t status;
        const char *advice;
        bool with_detail;
    } cases[] = {
        {TMS_OUT_OF_DEVICE_MEMORY, "Pause other tags", .with_detail = true},
        {TMS_OUT_OF_HOST_MEMORY, "(backup=\"disk\")", .with_detail = false},
        {TMS_DRIVER_UNAVAILABLE, "nvidia-smi", .with_detail = true},
        {TMS_DEVICE_LOST, "Restart the process", .with_detail = true},
        {TMS_CAPTURE_IN_PROGRESS, "End the capture first", .with_detail = false},
        {TMS_FORKED, "spawn or forkserver", .with_detail = false},
    };
    const tms_error_context_t context = {.operation = "pause", .device = TMS_NO_DEVICE};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        tms_error_t error;
        assert_int_equal(tms_error_set(&error, cases[i].status, &context, "detail of it"), cases[i].status);
        const char *detail = strstr(error.message, ": detail of it.");
        assert_non_null(detail);
        assert_int_equal(strstr(detail, cases[i].advice) != NULL, cases[i].with_detail);
        assert_int_equal(tms_error_set(&error, cases[i].status, &context, "%s", ""), cases[i].status);
    }
}

static void test_system_errors(void **state) {
    (void)state;
    const tms_error_context_t context = {.operation = "pause", .device = 0, .bytes = 4096, .tag = "weights"};
    tms_error_t error;
    assert_int_equal(tms_error_set_os(&error, &context, "pwrite", ENOSPC, "/disk/file"), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOSPC);
    assert_int_equal(error.driver_result, 0);
    assert_string_equal(error.call, "pwrite");
    assert_contains(error.message, "pwrite failed with errno 28 (No space left on device) for '/disk/file': 4.0 KiB, "
                                   "device 0, tag 'weights'.");
    assert_int_equal(tms_error_set_os(&error, &context, "mmap", ENOMEM, NULL), TMS_OUT_OF_HOST_MEMORY);
    assert_null(strstr(error.message, " for '"));
}

static void test_null_errors_are_accepted(void **state) {
    (void)state;
    assert_int_equal(tms_error_set(NULL, TMS_FORKED, NULL, "detail"), TMS_FORKED);
    assert_int_equal(tms_error_set_driver(NULL, NULL, "cuInit", 700, NULL), TMS_DEVICE_LOST);
    assert_int_equal(tms_error_set_os(NULL, NULL, "open", EACCES, NULL), TMS_BACKUP_IO);
}

/* Long texts are cut between characters, so that they stay valid UTF-8. */
static void test_long_texts_are_cut_at_characters(void **state) {
    (void)state;
    static const struct {
        const char *character;
        size_t kept; /* bytes of 63 that whole characters fill, after one ASCII byte */
    } cases[] = {{"x", 63}, {"\xC3\xA9", 63}, {"\xE2\x82\xAC", 61}, {"\xF0\x9F\x98\x80", 61}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char tag[5 * TMS_ERROR_MESSAGE_BYTES] = "a";
        size_t bytes = strlen(cases[i].character);
        for (size_t n = 0; n < TMS_ERROR_MESSAGE_BYTES; n++) memcpy(tag + 1 + n * bytes, cases[i].character, bytes + 1);
        const tms_error_context_t context = {.operation = "pause", .device = TMS_NO_DEVICE, .tag = tag};
        tms_error_t error;
        tms_error_set(&error, TMS_INVALID_STATE, &context, "%s", tag);
        assert_int_equal(strlen(error.tag), cases[i].kept);
        assert_memory_equal(error.tag, tag, cases[i].kept);
        size_t length = strlen(error.message), start = (size_t)(strstr(error.message, "; a") + 3 - error.message);
        assert_true(length >= sizeof(error.message) - 4 && length < sizeof(error.message));
        assert_int_equal((length - start) % strlen(cases[i].character), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_status_has_a_name_and_a_text),
        cmocka_unit_test(test_driver_results_map_to_statuses),
        cmocka_unit_test(test_clear),
        cmocka_unit_test(test_a_driver_error_names_every_detail),
        cmocka_unit_test(test_unknown_details_are_omitted),
        cmocka_unit_test(test_sizes_are_readable),
        cmocka_unit_test(test_each_status_names_a_remedy),
        cmocka_unit_test(test_system_errors),
        cmocka_unit_test(test_null_errors_are_accepted),
        cmocka_unit_test(test_long_texts_are_cut_at_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
