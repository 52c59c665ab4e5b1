/* Guards backup files in a file system in memory: they are host memory that the limits count. Each test has a process of
 * its own, because the limits are read once. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <linux/magic.h>

#include <cmocka.h>

#include "abi/process.h"
#include "abi/start.h"
#include "backup/host/batch.h"
#include "captured_stderr.h"
#include "own_process.h"
#include "temporary.h"

#define MIB          ((uint64_t)1 << 20)
#define IN_MEMORY    "/dev/shm"
#define LIMIT_MIB    "16"
#define LIMIT_BYTES  (16 * MIB)
#define OUTPUT_BYTES 4096

static const tms_error_context_t context = {.operation = "pause", .device = 0, .tag = "weights"};
static tms_error_t error;

#define CHECK(condition)                                                                                                    \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, error.message);                             \
            _exit(1);                                                                                                       \
        }                                                                                                                   \
    } while (0)

static tms_backup_stores_t *begin(const char *directory) {
    struct statfs system;
    if (statfs(IN_MEMORY, &system) != 0 || (uint64_t)system.f_type != TMPFS_MAGIC || access(IN_MEMORY, W_OK) != 0)
        _exit(SKIPPED);
    CHECK(setenv("TMS_HOST_MEMORY_LIMIT_MB", LIMIT_MIB, 1) == 0);
    tms_state_t *state = tms_state(&error);
    CHECK(state);
    CHECK(tms_disk_set_directory(&state->saver.stores.disk, directory, &error) == TMS_OK);
    return &state->saver.stores;
}

static tms_disk_file_t *create(tms_backup_stores_t *stores, uint64_t bytes) {
    tms_disk_file_t *file = NULL;
    tms_status_t status = tms_disk_file_create(&stores->disk, bytes, &file, NULL, &context, &error);
    CHECK((status == TMS_OK) == (file != NULL));
    return file;
}

static uint64_t held(tms_backup_stores_t *stores) {
    CHECK(stores->host.in_flight_bytes == 0);
    return atomic_load(&stores->host.resident_bytes);
}

static void count_against_the_limit(void) {
    char output[OUTPUT_BYTES];
    tms_backup_stores_t *stores = begin(IN_MEMORY);
    captured_stderr_t captured = capture_begin();
    tms_disk_file_t *first = create(stores, 10 * MIB);
    tms_disk_file_t *second = create(stores, 5 * MIB);
    capture_end(captured, output, sizeof output);
    CHECK(first && second);
    CHECK(count_lines(output) == 1 && strstr(output, first->path) && strstr(output, "TMS_DISK_BACKUP_DIR"));
    CHECK(held(stores) == 15 * MIB);
    CHECK(!create(stores, 2 * MIB));
    CHECK(error.status == TMS_OUT_OF_HOST_MEMORY && error.bytes == 2 * MIB);
    CHECK(strstr(error.message, "TMS_HOST_MEMORY_LIMIT_MB"));
    CHECK(strstr(error.message, "'" IN_MEMORY "/tms-") && strstr(error.message, "is in memory") &&
          strstr(error.message, "TMS_DISK_BACKUP_DIR"));
    CHECK(held(stores) == 15 * MIB);
    tms_disk_file_destroy(&stores->disk, first);
    CHECK(held(stores) == 5 * MIB);
    tms_disk_file_t *third = create(stores, 11 * MIB);
    CHECK(third && held(stores) == LIMIT_BYTES);
    tms_disk_file_destroy(&stores->disk, third);
    tms_disk_file_destroy(&stores->disk, second);
    CHECK(held(stores) == 0 && atomic_load(&stores->disk.total) == 0);
}

static void share_the_limit_with_host_memory(void) {
    tms_backup_stores_t *stores = begin(IN_MEMORY);
    tms_disk_file_t *file = create(stores, 12 * MIB);
    tms_host_headroom_t headroom;
    CHECK(file && !tms_host_store_fits(&stores->host, 5 * MIB, &headroom) && headroom.bytes == 4 * MIB);
    CHECK(tms_host_store_fits(&stores->host, 4 * MIB, &headroom));
    tms_disk_file_destroy(&stores->disk, file);
    CHECK(tms_host_store_fits(&stores->host, LIMIT_BYTES, &headroom));
}

static void give_the_claim_back_where_there_is_no_space(void) {
    tms_backup_stores_t *stores = begin(IN_MEMORY);
    stores->host.limits.cap_bytes = UINT64_MAX;
    stores->host.limits.cgroup_count = 0;
    CHECK(!create(stores, (uint64_t)1 << 50));
    CHECK(held(stores) == 0);
}

/* As at exit, while another thread creates a file. */
static int32_t remove_all(void *directory) {
    tms_disk_remove_all(directory);
    return 0;
}

static void give_the_claim_back_where_the_file_goes_meanwhile(void) {
    tms_backup_stores_t *stores = begin(IN_MEMORY);
    tms_disk_file_t *file = NULL;
    tms_wait_t wait;
    tms_wait_begin(&wait, remove_all, &stores->disk, INFINITY);
    wait.polled = -INFINITY;
    CHECK(tms_disk_file_create(&stores->disk, 4 * MIB, &file, &wait, &context, &error) == TMS_OK);
    CHECK(wait.polled > 0 && !file->owner_lock);
    CHECK(held(stores) == 0);
    tms_disk_file_destroy(&stores->disk, file);
    CHECK(held(stores) == 0 && atomic_load(&stores->disk.total) == 0);
}

static void not_count_on_a_disk(void) {
    struct statfs system;
    char directory[TEMPORARY_BYTES];
    CHECK(make_temporary_directory(directory, "disk"));
    CHECK(statfs(directory, &system) == 0);
    if ((uint64_t)system.f_type == TMPFS_MAGIC) {
        remove_temporary_directory(directory);
        _exit(SKIPPED);
    }
    tms_backup_stores_t *stores = begin(directory);
    tms_disk_file_t *file = create(stores, 20 * MIB);
    CHECK(file && held(stores) == 0);
    tms_disk_file_destroy(&stores->disk, file);
    CHECK(remove_temporary_directory(directory) == 0);
}

#define TESTS(X)                                                                                                            \
    X(count_against_the_limit)                                                                                              \
    X(share_the_limit_with_host_memory)                                                                                     \
    X(give_the_claim_back_where_there_is_no_space)                                                                          \
    X(give_the_claim_back_where_the_file_goes_meanwhile)                                                                    \
    X(not_count_on_a_disk)

#define DEFINE(body)                                                                                                        \
    static void files_##body(void **state) {                                                                                \
        (void)state;                                                                                                        \
        assert_exits(body);                                                                                                 \
    }
TESTS(DEFINE)
#undef DEFINE

int main(void) {
    const struct CMUnitTest tests[] = {
#define ENTRY(body) cmocka_unit_test(files_##body),
        TESTS(ENTRY)
#undef ENTRY
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
