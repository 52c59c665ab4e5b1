/* Guards the opening of the shared page, and that the page shows at every moment what the rows of the saver show. */

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "captured_stderr.h"
#include "core/model/kinds.h"
#include "neighbours.h"
#include "support.h"
#include "support/random_calls.h"
#include "temporary.h"

enum { STEPS = 400, GATE = 1 };

static char base[TEMPORARY_BYTES];

static int setup(void **state) {
    if (!make_temporary_directory(base, "pages")) return -1;
    setenv("TMS_SHARED_PAGE", base, 1);
    return setup_two_devices(state);
}

static unsigned count_files(void) {
    unsigned count = 0;
    DIR *stream = opendir(base);
    for (const struct dirent *entry; stream && (entry = readdir(stream));) count += entry->d_name[0] != '.';
    if (stream) closedir(stream);
    return count;
}

static int finish(void **state) {
    int result = teardown(state);
    assert_int_equal(count_files(), 0);
    return remove_temporary_directory(base) == 0 ? result : -1;
}

static tms_shared_page_contents_t look(fixture_t *f) {
    tms_shared_page_contents_t copy;
    int fd = open(f->saver.shared_page.file.path, O_RDONLY);
    assert_int_equal(tms_shared_page_file_read(fd, &copy), TMS_SHARED_PAGE_READ);
    close(fd);
    return copy;
}

static void it_is_made_at_the_first_allocation(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    assert_int_equal(count_files(), 0);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(count_files(), 0);
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(count_files(), 1);
    const tms_shared_page_contents_t page = look(f);
    CUuuid uuid;
    assert_int_equal(page.process.device_count, DEVICES);
    for (int device = 0; device < DEVICES; device++) {
        assert_int_equal(f->cuda->cuDeviceGetUuid(&uuid, f->topology->device[device].handle), CUDA_SUCCESS);
        assert_memory_equal(page.devices[device].uuid, &uuid, sizeof uuid);
        assert_int_equal(page.devices[device].total_bytes, 256 * MIB);
    }
}

static void a_device_without_uuid_is_unknown(void **state) {
    fixture_t *f = *state;
    simulator()->fail_after("cuDeviceGetUuid_v2", 0, 1, CUDA_ERROR_UNKNOWN);
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(simulator()->failures_fired(), 1);
    const tms_shared_page_contents_t page = look(f);
    assert_int_equal(page.devices[0].uuid[0] | page.devices[0].uuid[1], 0);
    assert_int_not_equal(page.devices[1].uuid[0], 0);
    assert_int_equal(page.rows[0].resident_bytes, 2 * MIB);
}

static void a_page_that_cannot_be_made_is_one_warning(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char output[2048];
    f->saver.shared_page.directory = "/proc/no/such/directory";
    captured_stderr_t captured = capture_begin();
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 5);
    allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    capture_end(captured, output, sizeof output);
    assert_filled(address, 2 * MIB, 5);
    const char *warning = strstr(output, "'/proc/no/such/directory' cannot be made: mkdirat failed");
    assert_non_null(warning);
    assert_non_null(strstr(warning, "TMS_SHARED_PAGE"));
    assert_null(strstr(strstr(warning, "mkdir"), "cannot be made"));
}

/* ---- what it shows ---- */

static const tms_shared_page_row_t *row_of(const tms_shared_page_contents_t *page, const char *tag, int device) {
    static const tms_shared_page_row_t empty;
    for (size_t i = 0; i < page->process.row_count; i++) {
        if (strcmp((const char *)page->rows[i].tag, tag) == 0 && page->rows[i].device == (uint64_t)device)
            return &page->rows[i];
    }
    return &empty;
}

/* Compares each row of the page with the sum of the saver's own rows. Returns the slack. */
static uint64_t compare(fixture_t *f) {
    static tms_segment_info_t rows[SEGMENTS + 1];
    uint64_t slack = 0;
    const tms_shared_page_contents_t page = look(f);
    size_t count = tms_inspect_segments(&f->saver, rows, SEGMENTS + 1);
    for (int t = 0; t < TAGS; t++) {
        for (int device = 0; device < DEVICES; device++) {
            tms_shared_page_row_t sum = {0};
            for (size_t i = 0; i < count; i++) {
                if (strcmp(rows[i].tag, tags[t]) != 0 || rows[i].device != device) continue;
                const bool active = rows[i].state == TMS_SEGMENT_ACTIVE;
                sum.allocations++;
                sum.resident_bytes += active ? rows[i].reserved_bytes : 0;
                sum.paused_bytes += active ? 0 : rows[i].reserved_bytes;
                *(rows[i].backup == TMS_BACKUP_DISK     ? &sum.disk_backup_bytes
                  : rows[i].backup == TMS_BACKUP_SHARED ? &sum.shared_backup_bytes
                                                        : &sum.host_backup_bytes) += rows[i].backup_bytes;
            }
            const tms_shared_page_row_t *shown = row_of(&page, tags[t], device);
            assert_int_equal(shown->allocations, sum.allocations);
            assert_int_equal(shown->resident_bytes, sum.resident_bytes);
            assert_int_equal(shown->paused_bytes, sum.paused_bytes);
            const tms_tag_t *tag = tms_tag_find(&f->regions.tags, tags[t]);
            assert_int_equal(shown->slack_bytes, tag ? tms_kinds_slack(tag->kinds, device) : 0);
            slack += shown->slack_bytes;
            assert_int_equal(shown->host_backup_bytes, sum.host_backup_bytes);
            assert_int_equal(shown->disk_backup_bytes, sum.disk_backup_bytes);
            assert_int_equal(shown->shared_backup_bytes, sum.shared_backup_bytes);
        }
    }
    assert_int_equal(page.process.allocations_total, tms_stats_read(&f->saver.stats.allocations_total));
    assert_int_equal(page.process.frees_total, tms_stats_read(&f->saver.stats.frees_total));
    assert_int_equal(page.process.pauses_total, tms_stats_read(&f->saver.stats.pauses.successes));
    assert_int_equal(page.process.resumes_total, tms_stats_read(&f->saver.stats.resumes.successes));
    assert_int_equal(page.process.running, TMS_SHARED_PAGE_IDLE);
    return slack;
}

static void it_shows_what_is_held(void **state) {
    fixture_t *f = *state;
    uint64_t addresses[SEGMENTS] = {0};
    uint32_t random = 20261125;
    addresses[0] = allocate(f, tags[0], TMS_BACKUP_NONE, 2 * MIB);
    for (int step = 0; step < STEPS; step++) {
        act(f, &random, addresses);
        (void)compare(f);
    }
}

static void it_shows_slack(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "weights", TMS_BACKUP_NONE, at);
    assert_int_equal(compare(f), 0);
    free_at(f, at[1]);
    free_at(f, at[2]);
    assert_int_equal(compare(f), 2 * NEIGHBOUR_BYTES);
    (void)allocate(f, "weights", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    assert_int_equal(compare(f), NEIGHBOUR_BYTES);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(compare(f), 0);
}

/* Rows are given to other tags when all of them are in use. */
static void it_shows_slack_in_the_row_that_its_tag_has_now(void **state) {
    fixture_t *f = *state;
    enum { OTHERS = TMS_SHARED_PAGE_ROWS / DEVICES, NAME_BYTES = 32 };
    char name[NAME_BYTES];
    uint64_t at[NEIGHBOURS], first = 0;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    for (int i = 0; i < NEIGHBOURS; i++) free_at(f, at[i]); /* the first three leave slack for a moment */
    for (int i = 0; i < DEVICES * OTHERS; i++) {
        (void)snprintf(name, sizeof name, "other %d", i / DEVICES);
        const uint64_t address = allocate_on(f, i % DEVICES, name, TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
        if (i == 0) first = address;
    }
    tms_shared_page_contents_t page = look(f);
    assert_int_equal(row_of(&page, "a", 0)->tag[0], 0); /* its row has gone to the last other tag */
    assert_int_equal(row_of(&page, name, 1)->resident_bytes, NEIGHBOUR_BYTES);
    free_at(f, first);
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    page = look(f);
    assert_int_equal(row_of(&page, "a", 0)->slack_bytes, NEIGHBOUR_BYTES);
    assert_int_equal(row_of(&page, name, 1)->slack_bytes, 0);
}

static void it_shows_a_pause_that_runs(void **state) {
    fixture_t *f = *state;
    held_pause_t held;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, address);
    begin_pause(&held, f, ALL_TAGS);
    tms_shared_page_contents_t page = look(f);
    assert_int_equal(page.process.running, TMS_SHARED_PAGE_PAUSE);
    assert_true(page.process.running_since >= page.process.made);
    assert_int_equal(page.rows[0].resident_bytes, 2 * MIB);
    simulator()->open_gate(GATE);
    join_pause(&held);
    (void)compare(f);
    page = look(f);
    assert_int_equal(page.rows[0].pauses_total, 1);
    assert_true(page.rows[0].last_pause_ended >= page.process.made);
    assert_true(page.process.last_pause_ended >= page.rows[0].last_pause_ended);
    destroy_stream(f, stream);
}

typedef struct held_free {
    fixture_t *fixture;
    uint64_t address;
    tms_status_t status;
} held_free_t;

static void *run_free(void *argument) {
    held_free_t *held = argument;
    held->status = tms_free_address(&held->fixture->saver, held->address, NULL);
    return NULL;
}

/* Its memory goes back only when the device no longer uses it. */
static void it_shows_a_free_that_waits(void **state) {
    fixture_t *f = *state;
    pthread_t thread;
    held_free_t held = {.fixture = f, .address = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB)};
    CUstream stream = launch_behind_gate(f, GATE, held.address);
    assert_int_equal(look(f).rows[0].allocations, 1);
    assert_int_equal(pthread_create(&thread, NULL, run_free, &held), 0);
    simulator()->wait_until_synchronizing();
    const tms_shared_page_contents_t page = look(f);
    const uint64_t mapped = physical_bytes(0);
    simulator()->open_gate(GATE);
    pthread_join(thread, NULL);
    assert_int_equal(held.status, TMS_OK);
    assert_int_equal(mapped, 2 * MIB);
    assert_int_equal(row_of(&page, "weights", 0)->allocations, 0);
    assert_int_equal(page.process.frees_total, 1);
    (void)compare(f);
    destroy_stream(f, stream);
}

static void it_counts_failures(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = 0;
    tms_tag_t *tag = NULL;
    allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(tms_tag_intern(&f->regions.tags, "kv_cache", &tag, &error), error);
    const tms_region_t region = {.tag = tag, .managed = true};
    assert_int_equal(tms_allocation_create(&f->saver, &region, 4 * GIB, 1, &address, &error), TMS_OUT_OF_DEVICE_MEMORY);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    (void)compare(f);
    const tms_shared_page_contents_t page = look(f);
    assert_int_equal(page.process.failed_allocations_total, 1);
    assert_int_equal(page.process.failed_resumes_total, 1);
    assert_int_equal(row_of(&page, "kv_cache", 1)->failed_allocations_total, 1);
    assert_int_equal(row_of(&page, "weights", 0)->failed_resumes_total, 1);
    assert_int_equal(row_of(&page, "weights", 0)->resumes_total, 0);
}

static void it_shows_damaged_allocations(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_not_equal(pause_all(f, &error), TMS_OK);
    assert_int_equal(look(f).rows[0].damaged, 1);
    tms_reclaim_all(&f->saver); /* repairs it: it is paused */
    assert_int_equal(look(f).rows[0].damaged, 0);
    (void)compare(f);
}

/* The page has columns for the stores of the library. A store of another kind is in none of them: the tests' own one, unless
 * it keeps shared contents too. */
static void check_columns(fixture_t *f, uint64_t expected_shared) {
    tms_error_t error;
    uint64_t host = 0, disk = 0, shared = 0, paused = 0;
    const uint64_t addresses[] = {allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB), allocate(f, "a", TMS_BACKUP_DISK, 4 * MIB),
                                  allocate(f, "b", HEAP_BACKUP, 8 * MIB)};
    ASSERT_OK(pause_all(f, &error), error);
    const tms_shared_page_contents_t page = look(f);
    for (uint64_t i = 0; i < page.process.row_count; i++) {
        host += page.rows[i].host_backup_bytes;
        disk += page.rows[i].disk_backup_bytes;
        shared += page.rows[i].shared_backup_bytes;
        paused += page.rows[i].paused_bytes;
    }
    assert_int_equal(host, 2 * MIB);
    assert_int_equal(disk, 4 * MIB);
    assert_int_equal(shared, expected_shared);
    assert_int_equal(paused, 14 * MIB);
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) free_at(f, addresses[i]);
}

static void backups_are_shown_by_store(void **state) {
    fixture_t *f = *state;
    check_columns(f, 0);
    for (int i = 0; i < f->saver.stores.count; i++) {
        if (f->saver.stores.list[i].store == &f->heap) f->saver.stores.list[i].kinds |= TMS_BACKUP_BIT(SHARED);
    }
    check_columns(f, 8 * MIB);
}

int main(void) {
#define PAGE_TEST(test) cmocka_unit_test_setup_teardown(test, setup, finish)
    const struct CMUnitTest tests[] = {
        PAGE_TEST(it_is_made_at_the_first_allocation),
        PAGE_TEST(a_device_without_uuid_is_unknown),
        PAGE_TEST(a_page_that_cannot_be_made_is_one_warning),
        PAGE_TEST(it_shows_what_is_held),
        PAGE_TEST(it_shows_slack),
        PAGE_TEST(it_shows_slack_in_the_row_that_its_tag_has_now),
        PAGE_TEST(it_shows_a_pause_that_runs),
        PAGE_TEST(it_shows_a_free_that_waits),
        PAGE_TEST(it_counts_failures),
        PAGE_TEST(it_shows_damaged_allocations),
        PAGE_TEST(backups_are_shown_by_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
