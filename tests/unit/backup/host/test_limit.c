/* Guards how much host memory may still be used, with a simulated system of files in a folder. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backup/host/limit.h"
#include "support/descriptors.h"
#include "temporary.h"

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

static char root[TEMPORARY_BYTES];

/* A file below the root, with the folders above it. */
static void put(const char *path, const char *text) {
    char name[2 * TEMPORARY_BYTES];
    (void)snprintf(name, sizeof name, "%s%s", root, path);
    for (char *slash = strchr(name + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        assert_true(mkdir(name, 0700) == 0 || errno == EEXIST);
        *slash = '/';
    }
    FILE *file = fopen(name, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void put_number(const char *path, uint64_t number) {
    char text[32];
    (void)snprintf(text, sizeof text, "%llu\n", (unsigned long long)number);
    put(path, text);
}

static void put_available(uint64_t bytes) {
    char text[256];
    (void)snprintf(text, sizeof text,
                   "MemTotal:       1024 kB\nMemFree:          12 kB\nMemAvailable: %9llu kB\nBuffers: 1 kB\n",
                   (unsigned long long)(bytes / 1024));
    put("/proc/meminfo", text);
}

/* A group of version 2 with a limit (0: "max"). */
static void put_second(const char *directory, uint64_t limit, uint64_t usage, uint64_t inactive_file) {
    char path[256], text[256];
    (void)snprintf(path, sizeof path, "%s/memory.max", directory);
    if (limit)
        put_number(path, limit);
    else
        put(path, "max\n");
    (void)snprintf(path, sizeof path, "%s/memory.current", directory);
    put_number(path, usage);
    (void)snprintf(path, sizeof path, "%s/memory.stat", directory);
    (void)snprintf(text, sizeof text, "anon 1\nfile 2\nactive_file 99\ninactive_file %llu\nworkingset 3\n",
                   (unsigned long long)inactive_file);
    put(path, text);
}

static void put_first(const char *directory, uint64_t limit, uint64_t usage, uint64_t inactive_file) {
    char path[256], text[256];
    (void)snprintf(path, sizeof path, "%s/memory.limit_in_bytes", directory);
    put_number(path, limit);
    (void)snprintf(path, sizeof path, "%s/memory.usage_in_bytes", directory);
    put_number(path, usage);
    (void)snprintf(path, sizeof path, "%s/memory.stat", directory);
    (void)snprintf(text, sizeof text, "cache 5\ninactive_file 7\ntotal_cache 5\ntotal_inactive_file %llu\n",
                   (unsigned long long)inactive_file);
    put(path, text);
}

static tms_host_limits_t find(uint64_t cap) {
    tms_host_limits_t limits;
    tms_error_t error;
    assert_int_equal(tms_host_limits_init(&limits, root, cap, &error), TMS_OK);
    assert_int_equal(limits.floor_bytes, 256 * MIB);
    return limits;
}

/* Finds the limits, and returns what is left. */
static tms_host_headroom_t headroom(uint64_t cap, uint64_t held) {
    tms_host_limits_t limits = find(cap);
    tms_host_headroom_t found = tms_host_limits_headroom(&limits, held);
    tms_host_limits_release(&limits);
    return found;
}

static void assert_room(tms_host_headroom_t found, uint64_t bytes, uint64_t limit, const char *where) {
    assert_int_equal(found.bytes, bytes);
    assert_int_equal(found.limit_bytes, limit);
    assert_string_equal(found.where, where);
}

static int setup(void **state) {
    (void)state;
    return make_temporary_directory(root, "host-limit") ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    return remove_temporary_directory(root);
}

/* ---- the system ---- */

static void available_memory_counts_and_total_memory_does_not(void **state) {
    (void)state;
    put_available(3 * GIB);
    assert_room(headroom(UINT64_MAX, 0), 3 * GIB - 256 * MIB, 0, "MemAvailable in /proc/meminfo");
    assert_room(headroom(UINT64_MAX, 5 * GIB), 3 * GIB - 256 * MIB, 0, "MemAvailable in /proc/meminfo");
    put_available(100 * MIB);
    assert_room(headroom(UINT64_MAX, 0), 0, 0, "MemAvailable in /proc/meminfo");
}

static void there_is_no_limit_if_nothing_can_be_read(void **state) {
    (void)state;
    assert_room(headroom(UINT64_MAX, 0), UINT64_MAX, 0, "");
    put("/proc/meminfo", "MemTotal: 1024 kB\nMemAvailable: many kB\n");
    put("/proc/self/cgroup", "0::/a\n");
    assert_room(headroom(UINT64_MAX, 0), UINT64_MAX, 0, "");
    put("/proc/self/cgroup", "nonsense");
    put("/proc/self/mountinfo", "nonsense\n - \n1 2 - cgroup2\n1 2 3 / - cgroup2 cgroup2 rw\n");
    assert_room(headroom(UINT64_MAX, 0), UINT64_MAX, 0, "");
}

static void the_programs_own_cap_counts_held_memory(void **state) {
    (void)state;
    put_available(3 * GIB);
    assert_room(headroom(GIB, 0), GIB, GIB, "TMS_HOST_MEMORY_LIMIT_MB");
    assert_room(headroom(GIB, GIB / 4), GIB - GIB / 4, GIB, "TMS_HOST_MEMORY_LIMIT_MB");
    assert_room(headroom(GIB, 2 * GIB), 0, GIB, "TMS_HOST_MEMORY_LIMIT_MB");
    assert_room(headroom(0, 0), 0, 0, "TMS_HOST_MEMORY_LIMIT_MB");
    assert_room(headroom(8 * GIB, 0), 3 * GIB - 256 * MIB, 0, "MemAvailable in /proc/meminfo");
}

/* ---- version 2 ---- */

#define SECOND "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"

static void a_group_of_version_2_limits_it(void **state) {
    (void)state;
    put_available(100 * GIB);
    put("/proc/self/cgroup", "0::/work/job\n");
    put("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/root rw\n" SECOND);
    put_second("/sys/fs/cgroup/work/job", 4 * GIB, GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), 3 * GIB - 256 * MIB, 4 * GIB, "/sys/fs/cgroup/work/job/memory.max");
    /* Unused page cache would be dropped. */
    put_second("/sys/fs/cgroup/work/job", 4 * GIB, GIB, 512 * MIB);
    assert_room(headroom(UINT64_MAX, 0), 3 * GIB + 512 * MIB - 256 * MIB, 4 * GIB, "/sys/fs/cgroup/work/job/memory.max");
    put_second("/sys/fs/cgroup/work/job", 4 * GIB, 5 * GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), 0, 4 * GIB, "/sys/fs/cgroup/work/job/memory.max");
}

static void every_group_on_the_path_counts(void **state) {
    (void)state;
    put_available(100 * GIB);
    put("/proc/self/cgroup", "0::/work/job/step\n");
    put("/proc/self/mountinfo", SECOND);
    put_second("/sys/fs/cgroup/work/job/step", 0, GIB, 0);
    put_second("/sys/fs/cgroup/work/job", 9 * GIB, GIB, 0);
    put_second("/sys/fs/cgroup/work", 8 * GIB, 6 * GIB, 0);
    put_second("/sys/fs/cgroup/elsewhere", 1, GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), 2 * GIB - 256 * MIB, 8 * GIB, "/sys/fs/cgroup/work/memory.max");
    /* The tightest limit is not the lowest one. */
    put_second("/sys/fs/cgroup/work", 8 * GIB, 6 * GIB, 5 * GIB);
    put_second("/sys/fs/cgroup/work/job", 9 * GIB, 8 * GIB, GIB / 2);
    assert_room(headroom(UINT64_MAX, 0), GIB + GIB / 2 - 256 * MIB, 9 * GIB, "/sys/fs/cgroup/work/job/memory.max");
    assert_room(headroom(GIB, 0), GIB, GIB, "TMS_HOST_MEMORY_LIMIT_MB");
}

static void limits_are_reread(void **state) {
    (void)state;
    put_available(100 * GIB);
    put("/proc/self/cgroup", "0::/job\n");
    put("/proc/self/mountinfo", SECOND);
    put_second("/sys/fs/cgroup/job", 0, GIB, 0);
    tms_host_limits_t limits = find(UINT64_MAX);
    assert_int_equal(tms_host_limits_headroom(&limits, 0).bytes, 100 * GIB - 256 * MIB);
    put_second("/sys/fs/cgroup/job", 2 * GIB, GIB, 0);
    assert_int_equal(tms_host_limits_headroom(&limits, 0).bytes, GIB - 256 * MIB);
    put("/sys/fs/cgroup/job/memory.current", "");
    assert_int_equal(tms_host_limits_headroom(&limits, 0).bytes, 100 * GIB - 256 * MIB);
    limits.floor_bytes = 0;
    assert_int_equal(tms_host_limits_headroom(&limits, 0).bytes, 100 * GIB);
    tms_host_limits_release(&limits);
}

/* In a container the mount shows a part of the hierarchy, with or without a namespace that hides the rest. */
static void a_mount_may_show_a_part_of_the_hierarchy(void **state) {
    (void)state;
    put_available(100 * GIB);
    put("/proc/self/cgroup", "0::/docker/abc/inner\n");
    put("/proc/self/mountinfo", "30 23 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n");
    put_second("/sys/fs/cgroup", 5 * GIB, GIB, 0);
    put_second("/sys/fs/cgroup/inner", 6 * GIB, GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), 4 * GIB - 256 * MIB, 5 * GIB, "/sys/fs/cgroup/memory.max");
    put_second("/sys/fs/cgroup/inner", 2 * GIB, GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), GIB - 256 * MIB, 2 * GIB, "/sys/fs/cgroup/inner/memory.max");
    put("/proc/self/cgroup", "0::/somewhere/else\n");
    assert_room(headroom(UINT64_MAX, 0), 4 * GIB - 256 * MIB, 5 * GIB, "/sys/fs/cgroup/memory.max");
    put("/proc/self/cgroup", "0::/docker/abcdef\n"); /* not below it: a longer name */
    assert_room(headroom(UINT64_MAX, 0), 4 * GIB - 256 * MIB, 5 * GIB, "/sys/fs/cgroup/memory.max");
    put("/proc/self/cgroup", "0::/../..\n");
    put("/proc/self/mountinfo", SECOND);
    assert_room(headroom(UINT64_MAX, 0), 4 * GIB - 256 * MIB, 5 * GIB, "/sys/fs/cgroup/memory.max");
}

static void blanks_in_a_path_are_read(void **state) {
    (void)state;
    put_available(100 * GIB);
    put("/proc/self/cgroup", "0::/\n");
    put("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/c\\040group rw - cgroup2 cgroup rw\n");
    put_second("/sys/fs/c group", 2 * GIB, GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), GIB - 256 * MIB, 2 * GIB, "/sys/fs/c group/memory.max");
    put("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup\\04 rw - cgroup2 cgroup rw\n"); /* no escape: three digits */
    put_second("/sys/fs/cgroup\\04", 3 * GIB, GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), 2 * GIB - 256 * MIB, 3 * GIB, "/sys/fs/cgroup\\04/memory.max");
}

/* ---- version 1, and both ---- */

#define FIRST                                                                                                               \
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"                                                     \
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"

static void a_group_of_version_1_limits_it(void **state) {
    (void)state;
    put_available(100 * GIB);
    put("/proc/self/cgroup", "9:name=systemd:/memory\n5:cpu,cpuacct:/x\n4:hugetlb,memory:/jobs/7\n");
    put("/proc/self/mountinfo", FIRST);
    put_first("/sys/fs/cgroup/memory", 9223372036854771712u, 60 * GIB, 0);
    put_first("/sys/fs/cgroup/memory/jobs", 9223372036854771712u, GIB, 0);
    put_first("/sys/fs/cgroup/memory/jobs/7", 3 * GIB, 2 * GIB, GIB);
    assert_room(headroom(UINT64_MAX, 0), 2 * GIB - 256 * MIB, 3 * GIB, "/sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes");
    put_first("/sys/fs/cgroup/memory/jobs/7", 9223372036854771712u, 2 * GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), 100 * GIB - 256 * MIB, 0, "MemAvailable in /proc/meminfo");
    put("/proc/meminfo", "");
    assert_room(headroom(UINT64_MAX, 0), UINT64_MAX, 0, ""); /* the largest number means no limit */
}

static void both_versions_count_if_both_are_mounted(void **state) {
    (void)state;
    put_available(100 * GIB);
    put("/proc/self/cgroup", "4:memory:/jobs\n0::/jobs\n");
    put("/proc/self/mountinfo", "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n" FIRST);
    put_first("/sys/fs/cgroup/memory/jobs", 3 * GIB, GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), 2 * GIB - 256 * MIB, 3 * GIB, "/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes");
    put_second("/sys/fs/cgroup/unified/jobs", 2 * GIB, GIB, 0);
    assert_room(headroom(UINT64_MAX, 0), GIB - 256 * MIB, 2 * GIB, "/sys/fs/cgroup/unified/jobs/memory.max");
}

/* ---- messages ---- */

/* Above memory.high a group is throttled, and pinned memory cannot be reclaimed. */
static void memory_high_of_version_2_counts_as_well(void **state) {
    (void)state;
    put_available(64 * GIB);
    put("/proc/self/cgroup", "0::/job\n");
    put("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    put_second("/sys/fs/cgroup/job", 8 * GIB, GIB, 0);
    put("/sys/fs/cgroup/job/memory.high", "max\n");
    assert_room(headroom(UINT64_MAX, 0), 7 * GIB - 256 * MIB, 8 * GIB, "/sys/fs/cgroup/job/memory.max");
    put_number("/sys/fs/cgroup/job/memory.high", 6 * GIB);
    assert_room(headroom(UINT64_MAX, 0), 5 * GIB - 256 * MIB, 6 * GIB, "/sys/fs/cgroup/job/memory.high");
    put_number("/sys/fs/cgroup/job/memory.high", 9 * GIB);
    assert_room(headroom(UINT64_MAX, 0), 7 * GIB - 256 * MIB, 8 * GIB, "/sys/fs/cgroup/job/memory.max");
}

static void the_message_names_the_need_the_rest_and_the_remedy(void **state) {
    (void)state;
    const tms_error_context_t context = {.operation = "pause", .device = 1, .bytes = 1, .tag = "weights"};
    tms_host_headroom_t room = {.bytes = 512 * MIB, .limit_bytes = 4 * GIB, .where = "/sys/fs/cgroup/job/memory.max"};
    tms_error_t error;
    assert_int_equal(tms_host_headroom_fail(&room, 3 * GIB, &context, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(error.bytes, 3 * GIB);
    assert_string_equal(error.tag, "weights");
    const char *parts[] = {"pause",
                           "3.0 GiB",
                           "512.0 MiB",
                           "/sys/fs/cgroup/job/memory.max (4096.0 MiB)",
                           "Raise this limit",
                           "backup=\"disk\"",
                           "backup=\"discard\""};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!strstr(error.message, parts[i])) fail_msg("'%s' is not in: %s", parts[i], error.message);
    }
}

/* This machine has limits, too, whatever they are. */
static void the_real_files_are_understood(void **state) {
    (void)state;
    tms_host_limits_t limits;
    tms_error_t error;
    assert_int_equal(tms_host_limits_init(&limits, "", UINT64_MAX, &error), TMS_OK);
    tms_host_headroom_t found = tms_host_limits_headroom(&limits, 0);
    assert_true(found.bytes < UINT64_MAX);
    assert_true(strlen(found.where) > 0);
    tms_host_limits_release(&limits);
}

/* A missing file differs from one that cannot be opened for lack of descriptors. */
static void a_failed_search_for_limits_does_not_mean_no_limit(void **state) {
    (void)state;
    tms_host_limits_t limits = find(UINT64_MAX);
    assert_int_equal(limits.os_error, 0); /* an empty directory */
    tms_host_limits_release(&limits);
    taken_descriptors_t taken = take_descriptors();
    limits = find(UINT64_MAX);
    give_descriptors_back(taken);
    assert_int_equal(limits.os_error, EMFILE);
    tms_host_limits_release(&limits);
}

static void assert_no_room_without_descriptors(const tms_host_limits_t *limits, const char *where) {
    const tms_error_context_t context = {.operation = "pause", .device = 1, .tag = "weights"};
    tms_error_t error;
    taken_descriptors_t taken = take_descriptors();
    tms_host_headroom_t found = tms_host_limits_headroom(limits, 0);
    give_descriptors_back(taken);
    assert_room(found, 0, 0, where);
    assert_int_equal(tms_host_headroom_fail(&found, GIB, &context, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(error.os_error, EMFILE);
    assert_string_equal(error.call, "open");
    assert_int_equal(error.bytes, GIB);
    assert_non_null(strstr(error.message, where));
    assert_non_null(strstr(error.message, strerror(EMFILE)));
}

/* It was readable before, and may hold anything now. */
static void a_limit_that_can_no_longer_be_opened_leaves_no_room(void **state) {
    (void)state;
    put_available(64 * GIB);
    tms_host_limits_t limits = find(UINT64_MAX);
    assert_no_room_without_descriptors(&limits, "/proc/meminfo");
    tms_host_limits_release(&limits);
    put("/proc/self/cgroup", "0::/job\n");
    put("/proc/self/mountinfo", SECOND);
    put_second("/sys/fs/cgroup/job", 8 * GIB, GIB, 0);
    limits = find(UINT64_MAX);
    assert_no_room_without_descriptors(&limits, "/sys/fs/cgroup/job/memory.high"); /* the last one that was read */
    assert_room(tms_host_limits_headroom(&limits, 0), 7 * GIB - 256 * MIB, 8 * GIB, "/sys/fs/cgroup/job/memory.max");
    tms_host_limits_release(&limits);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(available_memory_counts_and_total_memory_does_not),
        TEST(there_is_no_limit_if_nothing_can_be_read),
        TEST(the_programs_own_cap_counts_held_memory),
        TEST(a_group_of_version_2_limits_it),
        TEST(every_group_on_the_path_counts),
        TEST(limits_are_reread),
        TEST(a_mount_may_show_a_part_of_the_hierarchy),
        TEST(blanks_in_a_path_are_read),
        TEST(a_group_of_version_1_limits_it),
        TEST(both_versions_count_if_both_are_mounted),
        TEST(memory_high_of_version_2_counts_as_well),
        TEST(the_message_names_the_need_the_rest_and_the_remedy),
        TEST(the_real_files_are_understood),
        TEST(a_failed_search_for_limits_does_not_mean_no_limit),
        TEST(a_limit_that_can_no_longer_be_opened_leaves_no_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
