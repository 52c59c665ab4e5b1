/* Guards backup/disk/copy.c without failures: contents for each way of copying, resources that the files of one call share,
 * and that damaged data never reaches the device. pthread_create: there are threads. */
#include "support.h"

#include <sys/wait.h>

#include "own_process.h"
#include "support/disk_copy_fixture.h"

/* ---- contents ---- */

/* The pieces of a file: those that use direct I/O, and those with a remainder that cannot. */
static void count_pieces(uint64_t bytes, int *pieces, int *direct, int *rests) {
    for (*pieces = *direct = *rests = 0; bytes > 0; ++*pieces) {
        uint64_t piece = bytes < BUFFER ? bytes : BUFFER;
        *direct += piece >= ALIGNMENT;
        *rests += piece % ALIGNMENT != 0;
        bytes -= piece;
    }
}

typedef enum direction { SAVING, LOADING } direction_t;

static void assert_calls(way_t way, direction_t direction, uint64_t bytes) {
    const bool saving = direction == SAVING;
    int pieces, direct, rests;
    count_pieces(bytes, &pieces, &direct, &rests);
    int direct_calls = saving ? calls.direct_writes : calls.direct_reads;
    int plain_calls = saving ? calls.plain_writes : calls.plain_reads;
    assert_int_equal(simulator()->calls(saving ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync"), pieces);
    assert_int_equal(calls.submits, way == BY_URING ? direct : 0);
    assert_int_equal(calls.setups, way == BY_URING && direct > 0);
    assert_int_equal(direct_calls, way == BY_THREADS ? direct : 0);
    assert_int_equal(plain_calls, way == THROUGH_PAGE_CACHE ? pieces : rests);
    assert_int_equal(calls.direct_opens, way != THROUGH_PAGE_CACHE);
    /* A save is planned first, which examines the file. */
    assert_int_equal(calls.plain_opens, saving + (way == THROUGH_PAGE_CACHE || rests > 0));
}

static void assert_file(const char *path, uint64_t bytes, uint32_t seed) {
    struct stat found;
    assert_int_equal(stat(path, &found), 0);
    assert_int_equal(found.st_size, bytes);
    unsigned char *contents = malloc(bytes);
    assert_non_null(contents);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_int_equal(fread(contents, 1, bytes, file), bytes);
    fclose(file);
    assert_filled((uint64_t)contents, bytes, seed);
    free(contents);
}

static void round_trip(fixture_t *f, way_t way, uint64_t bytes, uint64_t chunk) {
    uint32_t seed = (uint32_t)(bytes + chunk + way);
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    tms_backup_t backup = prepared(f, bytes);
    f->saver.stores.disk.staging_bytes = chunk;
    set_way(f, way);
    fill(address, bytes, seed);
    clear_calls();
    save_one(f, &backup, address);
    assert_calls(way, SAVING, bytes);
    assert_nothing_held();
    assert_file(disk_file_of(f, &backup)->path, bytes, seed);
    memset((void *)address, 0, bytes);
    clear_calls();
    ASSERT_OK(load_one(f, &backup, address, &error), error);
    assert_calls(way, LOADING, bytes);
    assert_filled(address, bytes, seed);
    assert_nothing_held();
    tms_backup_destroy(&backup, &f->saver.stores);
    ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
}

static void contents_of_every_size_round_trip(void **state) {
    fixture_t *f = *state;
    const struct {
        uint64_t bytes, chunk;
    } sizes[] = {{1, BUFFER},
                 {ALIGNMENT - 1, BUFFER},
                 {ALIGNMENT, BUFFER},
                 {ALIGNMENT + 1, 256 * BUFFER},
                 {BUFFER - 1, BUFFER},
                 {BUFFER, BUFFER},
                 {BUFFER + 1, BUFFER},
                 {BUFFER + ALIGNMENT, BUFFER},
                 {2 * BUFFER + ALIGNMENT + 1, 3 * BUFFER},
                 {3 * BUFFER + 17, BUFFER},
                 {2 * BUFFER, 8 * BUFFER},
                 {2 * BUFFER + 512, 8 * BUFFER},
                 {9 * BUFFER - 512, 8 * BUFFER},
                 {4 * BUFFER - 1, 256 * BUFFER},
                 {4 * BUFFER + 1, 16 * BUFFER},
                 {2 * MAX_BUFFERS * BUFFER + 5, 256 * BUFFER}};
    FOR_EACH_WAY(way) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) round_trip(f, way, sizes[i].bytes, sizes[i].chunk);
    }
}

/* A file that was saved in one way is loaded in every other: the format is the same. */
static void a_file_saved_one_way_loads_in_every_other(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 5 * BUFFER + 33;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    tms_backup_t backup = prepared(f, bytes);
    uint32_t seed = 0;
    FOR_EACH_WAY(saved) {
        set_way(f, saved);
        fill(address, bytes, ++seed);
        save_one(f, &backup, address);
        FOR_EACH_WAY(loaded) {
            set_way(f, loaded);
            assert_loads(f, &backup, address, seed);
        }
    }
    tms_backup_destroy(&backup, &f->saver.stores);
}

static void a_file_system_in_memory_has_threads(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t bytes = 3 * BUFFER + 5;
    char shared[] = "/dev/shm/tms-test-copies-XXXXXX";
    if (!mkdtemp(shared)) {
        print_message("skipped: there is no /dev/shm to write to\n");
        skip();
    }
    ASSERT_OK(tms_disk_set_directory(&f->saver.stores.disk, shared, &error), error);
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    tms_backup_t backup = prepared(f, bytes);
    bool in_memory = disk_file_of(f, &backup)->identity.in_memory;
    f->saver.stores.disk.staging_bytes = BUFFER;
    fill(address, bytes, 3);
    clear_calls();
    save_one(f, &backup, address);
    if (in_memory) {
        assert_int_equal(calls.direct_opens, 0);
        assert_int_equal(calls.setups, 0);
        assert_int_equal(calls.plain_writes, 4);
        assert_int_equal(calls.threads, 3); /* the last piece is too small for direct I/O */
    }
    assert_loads(f, &backup, address, 3);
    tms_backup_destroy(&backup, &f->saver.stores);
    assert_int_equal(rmdir(shared), 0);
    if (!in_memory) skip();
}

/* ---- many files ---- */

enum { FILES = 40 };

static void many_files_share_one_ring(void **state) {
    fixture_t *f = *state;
    static const uint64_t sizes[] = {3 * BUFFER + 7, 16 * 1024, 5 * BUFFER, ALIGNMENT - 9};
    f->saver.stores.disk.staging_bytes = 256 * BUFFER;
    FOR_EACH_WAY(way) {
        tms_error_t error;
        tms_copier_t copier;
        tms_backup_t backups[FILES];
        uint64_t addresses[FILES];
        set_way(f, way);
        for (uint32_t i = 0; i < FILES; i++) {
            uint64_t bytes = sizes[i % (sizeof sizes / sizeof *sizes)];
            fill(addresses[i] = allocate(f, "a", TMS_BACKUP_NONE, bytes), bytes, i);
            backups[i] = prepared(f, bytes);
        }
        int descriptors = count_descriptors();
        for (int saving = 1; saving >= 0; saving--) {
            clear_calls();
            open_copier(f, &copier, NULL);
            for (uint32_t i = 0; i < FILES; i++) {
                if (!saving) memset((void *)addresses[i], 0, backups[i].bytes);
                ASSERT_OK(saving ? tms_backup_save(&backups[i], &f->saver.stores, &copier, addresses[i], &CONTEXT, &error)
                                 : tms_backup_load(&backups[i], &f->saver.stores, &copier, addresses[i], &CONTEXT, &error),
                          error);
            }
            ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
            tms_copier_close(&copier);
            /* The first file has four pieces: 4, 4, 8 and 8 buffers. */
            assert_int_equal(simulator()->calls("cuMemHostRegister"), 4);
            assert_int_equal(calls.maps, 4);
            assert_int_equal(simulator()->calls("cuEventCreate"), MAX_BUFFERS);
            assert_int_equal(calls.setups, way == BY_URING);
            assert_int_equal(calls.threads, way == BY_URING ? 0 : TMS_MAX_DISK_WORKERS);
            assert_nothing_held();
            assert_int_equal(count_descriptors(), descriptors);
            for (uint32_t i = 0; saving && i < FILES; i++) tms_backup_commit(&backups[i], &f->saver.stores);
        }
        for (uint32_t i = 0; i < FILES; i++) {
            assert_filled(addresses[i], backups[i].bytes, i);
            tms_backup_destroy(&backups[i], &f->saver.stores);
            ASSERT_OK(tms_free_address(&f->saver, addresses[i], &error), error);
        }
    }
}

/* Files of one piece each: the disk gets the largest allowed number of requests before the first wait. */
static void small_files_keep_the_disk_busy(void **state) {
    fixture_t *f = *state;
    enum { SMALL = 24 };
    tms_error_t error;
    tms_copier_t copier;
    tms_backup_t backups[SMALL];
    if (!has_way(BY_URING)) skip();
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BUFFER);
    fill(address, BUFFER, 1);
    for (int i = 0; i < SMALL; i++) backups[i] = prepared(f, BUFFER);
    for (int saving = 1; saving >= 0; saving--) {
        clear_calls();
        open_copier(f, &copier, NULL);
        for (int i = 0; i < SMALL; i++) {
            ASSERT_OK(saving ? tms_backup_save(&backups[i], &f->saver.stores, &copier, address, &CONTEXT, &error)
                             : tms_backup_load(&backups[i], &f->saver.stores, &copier, address, &CONTEXT, &error),
                      error);
            if (i + 1 < MAX_IN_FLIGHT) assert_int_equal(calls.waits, 0);
        }
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        tms_copier_close(&copier);
        assert_int_equal(calls.submits, SMALL);
        if (calls.waits > 0) assert_true(calls.submits_before_wait >= MAX_IN_FLIGHT);
        for (int i = 0; saving && i < SMALL; i++) tms_backup_commit(&backups[i], &f->saver.stores);
    }
    assert_filled(address, BUFFER, 1);
    for (int i = 0; i < SMALL; i++) tms_backup_destroy(&backups[i], &f->saver.stores);
}

/* ---- damage ---- */

enum { FRESH = 0xEE };

static void assert_untouched(uint64_t address, uint64_t from, uint64_t to) {
    for (uint64_t i = from; i < to; i++) {
        if (((const uint8_t *)address)[i] != FRESH) fail_msg("byte %llu was written", (unsigned long long)i);
    }
}

static void a_damaged_block_never_reaches_the_device(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 7 * BUFFER + 100;
    static const uint64_t places[] = {0, 2 * BUFFER - 1, 2 * BUFFER, 5 * BUFFER + 4095, 7 * BUFFER + 99};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    FOR_EACH_WAY(way) {
        tms_backup_t backup = prepared(f, bytes);
        set_way(f, way);
        fill(address, bytes, 5);
        save_one(f, &backup, address);
        for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
            tms_error_t error;
            uint64_t piece = places[i] / BUFFER * BUFFER;
            change_byte(disk_file_of(f, &backup)->path, places[i], 1);
            memset((void *)address, FRESH, bytes);
            clear_calls();
            assert_int_equal(load_one(f, &backup, address, &error), TMS_BACKUP_IO);
            assert_non_null(strstr(error.message, "was changed or truncated"));
            assert_non_null(strstr(error.message, disk_file_of(f, &backup)->path));
            assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), piece / BUFFER);
            assert_filled(address, piece, 5);
            assert_untouched(address, piece, bytes);
            assert_nothing_held();
            change_byte(disk_file_of(f, &backup)->path, places[i], -1);
        }
        assert_loads(f, &backup, address, 5);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

static void a_truncated_file_never_reaches_the_device(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 3 * BUFFER + 100;
    static const uint64_t ends[] = {0, 1, ALIGNMENT, BUFFER - 1, 2 * BUFFER + ALIGNMENT + 7, 3 * BUFFER + 99};
    f->saver.stores.disk.staging_bytes = BUFFER;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    FOR_EACH_WAY(way) {
        set_way(f, way);
        for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
            tms_error_t error;
            char text[64];
            tms_backup_t backup = prepared(f, bytes);
            fill(address, bytes, 6);
            save_one(f, &backup, address);
            assert_int_equal(truncate(disk_file_of(f, &backup)->path, (off_t)ends[i]), 0);
            memset((void *)address, FRESH, bytes);
            assert_int_equal(load_one(f, &backup, address, &error), TMS_BACKUP_IO);
            snprintf(text, sizeof text, "it ends at offset %llu of %llu", (unsigned long long)ends[i],
                     (unsigned long long)bytes);
            if (!strstr(error.message, text)) fail_msg("'%s' does not say '%s'", error.message, text);
            assert_untouched(address, ends[i] / BUFFER * BUFFER, bytes);
            tms_backup_destroy(&backup, &f->saver.stores);
        }
    }
}

/* ---- interruption ---- */

#define COPIES(test) cmocka_unit_test_setup_teardown(test, setup_disk_copies, teardown_disk_copies)

int main(void) {
    const struct CMUnitTest tests[] = {
        COPIES(contents_of_every_size_round_trip),
        COPIES(a_file_saved_one_way_loads_in_every_other),
        COPIES(a_file_system_in_memory_has_threads),
        COPIES(many_files_share_one_ring),
        COPIES(small_files_keep_the_disk_busy),
        COPIES(a_damaged_block_never_reaches_the_device),
        COPIES(a_truncated_file_never_reaches_the_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
