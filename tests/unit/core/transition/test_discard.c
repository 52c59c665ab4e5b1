/* Guards pause(backup="discard") of memory that is paused already: it discards the backup, wherever that is and whatever has
 * become of it, and nothing else changes. */
#include "support.h"

#include <string.h>
#include <unistd.h>

#define BYTES (2 * MIB)

static const tms_selection_t discarding = {.has_backup = 1, .backup = TMS_BACKUP_NONE};

static tms_segment_t *segment_at(fixture_t *f, uint64_t address) {
    return tms_segment_of(tms_registry_find(&f->saver.registry, address));
}

static tms_status_t discard_with_report(fixture_t *f, const char *tag, tms_report_t *report, tms_error_t *error) {
    tms_selection_t selection = discarding;
    if (tag) selection.tags = &tag;
    selection.tag_count = tag != NULL;
    return pause_selected_with_report(f, &selection, report, error);
}

static tms_status_t discard(fixture_t *f, const char *tag, tms_error_t *error) {
    return discard_with_report(f, tag, NULL, error);
}

static uint64_t allocate_paused(fixture_t *f, const char *tag, tms_backup_kind_t kind, uint32_t seed) {
    tms_error_t error;
    uint64_t address = allocate(f, tag, kind, BYTES);
    fill(address, BYTES, seed);
    ASSERT_OK(pause_tag(f, tag, &error), error);
    return address;
}

static void assert_no_backups(fixture_t *f) {
    tms_counters_t counters;
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.host_backup_bytes, 0);
    assert_int_equal(counters.disk_backup_bytes, 0);
}

/* The pause has moved nothing: the memory comes back without contents. */
static void assert_discarded(fixture_t *f, uint64_t address) {
    tms_error_t error;
    tms_report_t report;
    tms_segment_info_t info;
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
    assert_int_equal(report.copied_bytes, 0);
    assert_poisoned(address, BYTES);
    assert_int_equal(tms_inspect_find(&f->saver, address, 1, &info), TMS_OK);
    assert_int_equal(info.contents, TMS_CONTENTS_UNDEFINED);
}

static void every_kind_of_backup_is_discarded(void **state) {
    fixture_t *f = *state;
    static const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        tms_error_t error;
        tms_report_t report;
        uint64_t address = allocate_paused(f, "a", kinds[i], 1);
        simulator()->clear_counts();
        ASSERT_OK(discard_with_report(f, "a", &report, &error), error);
        assert_int_equal(report.allocations + report.bytes + report.copied_bytes, 0);
        assert_int_equal(simulator()->calls("cuCtxSynchronize") + simulator()->calls("cuMemUnmap"), 0);
        assert_no_backups(f);
        assert_discarded(f, address);
        /* The next pause keeps contents again. */
        fill(address, BYTES, 2);
        ASSERT_OK(pause_tag(f, "a", &error), error);
        ASSERT_OK(resume_tag(f, "a", &error), error);
        assert_filled(address, BYTES, 2);
        ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    }
}

/* A file that was deleted, and one that was changed: a resume fails again and again, and says what to do. */
static void a_lost_file_is_discarded(void **state) {
    fixture_t *f = *state;
    for (int deleted = 0; deleted < 2; deleted++) {
        tms_error_t error;
        uint64_t address = allocate_paused(f, "a", TMS_BACKUP_DISK, 1);
        const char *path = disk_file_of(f, &segment_at(f, address)->backup)->path;
        if (deleted)
            assert_int_equal(unlink(path), 0);
        else
            assert_int_equal(truncate(path, 1000), 0);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(resume_tag(f, "a", &error), TMS_BACKUP_IO);
            assert_non_null(strstr(error.message, "pause(tag, backup=\"discard\")"));
        }
        ASSERT_OK(discard(f, "a", &error), error);
        assert_no_backups(f);
        assert_discarded(f, address);
        ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    }
}

static void the_memory_may_be_zeroed_or_freed(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t zeroing = {.zero = 1};
    uint64_t freed = allocate_paused(f, "a", TMS_BACKUP_PINNED, 1), kept = allocate_paused(f, "a", TMS_BACKUP_DISK, 2);
    ASSERT_OK(discard(f, ALL_TAGS, &error), error);
    ASSERT_OK(tms_free_address(&f->saver, freed, &error), error);
    ASSERT_OK(resume_selected(f, &zeroing, &error), error);
    for (uint64_t i = 0; i < BYTES; i++) assert_int_equal(((const unsigned char *)kept)[i], 0);
}

static void other_tags_keep_theirs(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t kept = allocate_paused(f, "kept", TMS_BACKUP_PINNED, 1), gone = allocate_paused(f, "a", TMS_BACKUP_PINNED, 2);
    ASSERT_OK(discard(f, "a", &error), error);
    ASSERT_OK(discard(f, "no such tag", &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(kept, BYTES, 1);
    assert_poisoned(gone, BYTES);
}

/* Other pauses of paused memory leave it alone. */
static void other_pauses_discard_nothing(void **state) {
    fixture_t *f = *state;
    static const tms_selection_t others[] = {
        {.has_backup = 0}, {.has_backup = 1, .backup = TMS_BACKUP_PINNED}, {.has_backup = 1, .backup = TMS_BACKUP_DISK}};
    tms_error_t error;
    uint64_t address = allocate_paused(f, "a", TMS_BACKUP_PINNED, 1);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) ASSERT_OK(pause_selected(f, &others[i], &error), error);
    ASSERT_OK(resume_selected(f, &discarding, &error), error); /* of a resume the fields mean nothing */
    assert_filled(address, BYTES, 1);
}

static void the_report_counts_what_was_resident(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t paused = allocate_paused(f, "a", TMS_BACKUP_PINNED, 1);
    uint64_t resident = allocate(f, "a", TMS_BACKUP_DISK, 2 * BYTES);
    ASSERT_OK(discard_with_report(f, "a", &report, &error), error);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(report.bytes, 2 * BYTES);
    assert_int_equal(state_of(f, resident), TMS_SEGMENT_PAUSED);
    assert_discarded(f, paused);
}

/* A copy that a program still looks at stays valid for it. */
static void a_retained_copy_is_discarded(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
    uint64_t address = allocate_paused(f, "a", TMS_BACKUP_PINNED, 1);
    ASSERT_OK(resume_all(f, &error), error);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(tms_inspect_host_backup(&f->saver, address, BYTES, &buffer, &host, &error), error);
    assert_non_null(host);
    ASSERT_OK(discard(f, ALL_TAGS, &error), error);
    assert_filled((uint64_t)host, BYTES, 1);
    tms_host_buffer_drop(buffer);
    ASSERT_OK(tms_inspect_host_backup(&f->saver, address, BYTES, &buffer, &host, &error), error);
    assert_null(host);
    assert_no_backups(f);
    assert_discarded(f, address);
}

static int32_t preserve_first_mebibyte(void *context, tms_live_t *live) {
    static tms_live_range_t range;
    const uint64_t *address = context;
    range = (tms_live_range_t){*address, *address + MIB};
    *live = (tms_live_t){.allocations = address, .allocation_count = 1, .ranges = &range, .range_count = 1};
    return 0;
}

static void preserved_blocks_are_discarded(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BYTES);
    const tms_selection_t preserving = {.preserves = 1, .find_live = preserve_first_mebibyte, .live_context = &address};
    ASSERT_OK(pause_selected(f, &preserving, &error), error);
    ASSERT_OK(discard(f, ALL_TAGS, &error), error);
    assert_no_backups(f);
    assert_discarded(f, address);
}

/* A pause that fails has discarded nothing. */
static void a_failed_pause_gives_nothing_up(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t paused = allocate_paused(f, "a", TMS_BACKUP_PINNED, 1), resident = allocate(f, "a", TMS_BACKUP_NONE, BYTES);
    fill(resident, BYTES, 2);
    simulator()->fail_after("cuCtxSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(discard(f, ALL_TAGS, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, resident), TMS_SEGMENT_ACTIVE);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(paused, BYTES, 1);
    assert_filled(resident, BYTES, 2);
    uint64_t capture = 0;
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(tms_capture_table_begin(&f->saver, NULL, &capture, &error), error);
    assert_int_equal(discard(f, ALL_TAGS, &error), TMS_CAPTURE_IN_PROGRESS);
    (void)tms_capture_end_of(&f->saver, capture);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(paused, BYTES, 1);
}

/* The driver has not released its memory yet. The space of the backup stays until it has, and the contents are gone. */
static void damaged_memory_gives_its_contents_up(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_DISK, BYTES);
    fill(address, BYTES, 1);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_int_equal(unlink(disk_file_of(f, &segment_at(f, address)->backup)->path), 0);
    ASSERT_OK(discard(f, ALL_TAGS, &error), error);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_DAMAGED);
    ASSERT_OK(pause_all(f, &error), error); /* repairs it */
    assert_discarded(f, address);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(every_kind_of_backup_is_discarded), ONE(a_lost_file_is_discarded),
        ONE(the_memory_may_be_zeroed_or_freed), ONE(other_tags_keep_theirs),
        ONE(other_pauses_discard_nothing),      ONE(the_report_counts_what_was_resident),
        ONE(a_retained_copy_is_discarded),      ONE(preserved_blocks_are_discarded),
        ONE(a_failed_pause_gives_nothing_up),   ONE(damaged_memory_gives_its_contents_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
