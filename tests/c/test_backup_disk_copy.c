/* backup_disk_copy.c, as long as nothing fails: contents, in each of the ways in which bytes get to the disk; what the files
 * of one call share; and that what is damaged never reaches the device. pthread_create: there are threads. */
#include "support.h"

#include <sys/wait.h>

#include "disk_copy_fixture.h"
#include "own_process.h"

/* ---- contents ---- */

/* The pieces of a file, those with something to transfer directly, and those with a rest that cannot be. */
static void count_pieces(uint64_t bytes, int *pieces, int *direct, int *rests) {
    for (*pieces = *direct = *rests = 0; bytes > 0; ++*pieces) {
        uint64_t piece = bytes < BUFFER ? bytes : BUFFER;
        *direct += piece >= ALIGNMENT;
        *rests += piece % ALIGNMENT != 0;
        bytes -= piece;
    }
}

static void assert_calls(way_t way, bool saving, uint64_t bytes) {
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
    /* A save is planned first, which looks at the file. */
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
    f->saver.stores.chunk_bytes = chunk;
    set_way(f, way);
    fill(address, bytes, seed);
    clear_calls();
    save_one(f, &backup, address);
    assert_calls(way, true, bytes);
    assert_nothing_held();
    assert_file(backup.file->path, bytes, seed);
    memset((void *)address, 0, bytes);
    clear_calls();
    ASSERT_OK(load_one(f, &backup, address, &error), error);
    assert_calls(way, false, bytes);
    assert_filled(address, bytes, seed);
    assert_nothing_held();
    tms_backup_destroy(&backup, &f->saver.stores);
    ASSERT_OK(tms_saver_free(&f->saver, address, &error), error);
}

static void contents_of_every_size_make_the_round_trip(void **state) {
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
                 {2 * BUFFERS_MOST * BUFFER + 5, 256 * BUFFER}};
    FOR_EACH_WAY(way) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) round_trip(f, way, sizes[i].bytes, sizes[i].chunk);
    }
}

/* What was saved in one way is loaded in another: the file is the same. */
static void the_ways_are_of_one_file(void **state) {
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
    bool in_memory = backup.file->identity.in_memory;
    f->saver.stores.chunk_bytes = BUFFER;
    fill(address, bytes, 3);
    clear_calls();
    save_one(f, &backup, address);
    if (in_memory) {
        assert_int_equal(calls.direct_opens, 0);
        assert_int_equal(calls.setups, 0);
        assert_int_equal(calls.plain_writes, 4);
        assert_int_equal(calls.threads, 3); /* the last piece is too small for one */
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
    f->saver.stores.chunk_bytes = 256 * BUFFER;
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
                ASSERT_OK(saving ? tms_backup_save(&backups[i], &copier, addresses[i], &CONTEXT, &error)
                                 : tms_backup_load(&backups[i], &copier, addresses[i], &CONTEXT, &error),
                          error);
            }
            ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
            tms_copier_close(&copier);
            /* The first file has four pieces: 4, 4, 8 and 8 buffers. */
            assert_int_equal(simulator()->calls("cuMemHostRegister"), 4);
            assert_int_equal(calls.maps, 4);
            assert_int_equal(simulator()->calls("cuEventCreate"), BUFFERS_MOST);
            assert_int_equal(calls.setups, way == BY_URING);
            assert_int_equal(calls.threads, way == BY_URING ? 0 : TMS_DISK_WORKERS_MOST);
            assert_nothing_held();
            assert_int_equal(count_descriptors(), descriptors);
            for (uint32_t i = 0; saving && i < FILES; i++) tms_backup_commit(&backups[i], &f->saver.stores);
        }
        for (uint32_t i = 0; i < FILES; i++) {
            assert_filled(addresses[i], backups[i].bytes, i);
            tms_backup_destroy(&backups[i], &f->saver.stores);
            ASSERT_OK(tms_saver_free(&f->saver, addresses[i], &error), error);
        }
    }
}

/* Files of one piece each: the disk has as many of them as it may have before anything is waited for. */
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
            ASSERT_OK(saving ? tms_backup_save(&backups[i], &copier, address, &CONTEXT, &error)
                             : tms_backup_load(&backups[i], &copier, address, &CONTEXT, &error),
                      error);
            if (i + 1 < IN_FLIGHT_MOST) assert_int_equal(calls.waits, 0);
        }
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        tms_copier_close(&copier);
        assert_int_equal(calls.submits, SMALL);
        if (calls.waits > 0) assert_true(calls.submits_before_wait >= IN_FLIGHT_MOST);
        for (int i = 0; saving && i < SMALL; i++) tms_backup_commit(&backups[i], &f->saver.stores);
    }
    assert_filled(address, BUFFER, 1);
    for (int i = 0; i < SMALL; i++) tms_backup_destroy(&backups[i], &f->saver.stores);
}

/* While the disk stands still, saves go on until the ring is full; nothing counts as written before the wait. */
static void a_save_does_not_wait_for_its_writes(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    tms_backup_t backups[IN_FLIGHT_MOST];
    set_way(f, BY_THREADS);
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BUFFER);
    fill(address, BUFFER, 1);
    for (int i = 0; i < IN_FLIGHT_MOST; i++) backups[i] = prepared(f, BUFFER);
    open_copier(f, &copier, NULL);
    set_gate(true);
    for (int i = 0; i < IN_FLIGHT_MOST; i++)
        ASSERT_OK(tms_backup_save(&backups[i], &copier, address, &CONTEXT, &error), error);
    set_gate(false);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    for (int i = 0; i < IN_FLIGHT_MOST; i++) {
        tms_backup_commit(&backups[i], &f->saver.stores);
        assert_loads(f, &backups[i], address, 1);
        tms_backup_destroy(&backups[i], &f->saver.stores);
    }
}

/* Asked while something is waited for: when no read has been begun for a while it looks how far everything has come, and
 * lets those that wait end. */
typedef struct watcher {
    int release, submits, still;    /* `submits` in the end: before they were let go */
    uint64_t on_device, off_device; /* copies to the device that were begun, and that were waited for */
    bool released;
} watcher_t;

static int32_t look_and_release(void *context) {
    enum { LONG = 20, ENOUGH = 64 };
    watcher_t *watcher = context;
    const char bytes[ENOUGH] = {0};
    if (watcher->released) return 0;
    if (watcher->submits != calls.submits) watcher->still = 0;
    watcher->submits = calls.submits;
    if (++watcher->still < LONG) return 0;
    watcher->on_device = simulator()->calls("cuMemcpyHtoDAsync");
    watcher->off_device = simulator()->calls("cuEventSynchronize");
    watcher->released = true;
    assert_int_equal(write(watcher->release, bytes, ENOUGH), ENOUGH);
    return 0;
}

/* Of the reads all but the first `unpiped` wait, or so many of them, until nothing else moves. */
static watcher_t load_while_reads_wait(fixture_t *f, int unpiped, int piped) {
    const uint64_t bytes = 64 * BUFFER;
    tms_error_t error;
    tms_copier_t copier;
    tms_wait_t wait;
    int ends[2];
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    tms_backup_t backup = prepared(f, bytes);
    fill(address, bytes, 3);
    /* What a read that waited gets from the pipe: its first byte. */
    for (uint64_t i = 0; i < bytes; i += BUFFER) *(char *)(address + i) = 0;
    char *expected = malloc(bytes);
    assert_non_null(expected);
    memcpy(expected, (const void *)address, bytes);
    save_one(f, &backup, address);
    memset((void *)address, 0xEE, bytes);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    watcher_t watcher = {.release = ends[1]};
    clear_calls();
    fault.pipe_end = ends[0];
    fault.unpiped = unpiped;
    fault.piped = piped;
    tms_wait_begin(&wait, look_and_release, &watcher, 0);
    open_copier(f, &copier, &wait);
    ASSERT_OK(tms_backup_load(&backup, &copier, address, &CONTEXT, &error), error);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    fault.pipe_end = -1;
    close(ends[0]), close(ends[1]);
    assert_memory_equal((const void *)address, expected, bytes);
    free(expected);
    tms_backup_destroy(&backup, &f->saver.stores);
    assert_true(watcher.released);
    return watcher;
}

/* The disk has work for as long as there is room for what it reads. */
static void reads_do_not_wait_for_one_that_is_late(void **state) {
    if (!has_way(BY_URING)) skip();
    assert_int_equal(load_while_reads_wait(*state, 0, 1).submits, AHEAD_MOST);
}

static void what_is_read_goes_on_while_the_disk_stands_still(void **state) {
    if (!has_way(BY_URING)) skip();
    watcher_t watcher = load_while_reads_wait(*state, 1, NEVER);
    assert_int_equal(watcher.submits, 1 + IN_FLIGHT_MOST);
    assert_int_equal(watcher.on_device, 1);
}

/* Although there are others left: the fewer are gone through, the better. */
static void buffers_come_back_from_the_device_early(void **state) {
    enum { READ = 6, WITH_DEVICE = 2 };
    if (!has_way(BY_URING)) skip();
    watcher_t watcher = load_while_reads_wait(*state, READ, NEVER);
    assert_int_equal(watcher.submits, READ + IN_FLIGHT_MOST);
    assert_int_equal(watcher.on_device, READ);
    assert_int_equal(watcher.off_device, READ - WITH_DEVICE);
}

/* One copier, first to the disk and then from it, without a wait between. */
static void a_copier_turns_around(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    const uint64_t bytes = 6 * BUFFER + 1;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes), other = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    fill(address, bytes, 4);
    FOR_EACH_WAY(way) {
        tms_backup_t backup = prepared(f, bytes);
        set_way(f, way);
        memset((void *)other, 0, bytes);
        open_copier(f, &copier, NULL);
        ASSERT_OK(tms_backup_save(&backup, &copier, address, &CONTEXT, &error), error);
        tms_backup_commit(&backup, &f->saver.stores);
        ASSERT_OK(tms_backup_load(&backup, &copier, other, &CONTEXT, &error), error);
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        tms_copier_close(&copier);
        assert_filled(other, bytes, 4);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
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
            change_byte(backup.file->path, places[i], 1);
            memset((void *)address, FRESH, bytes);
            clear_calls();
            assert_int_equal(load_one(f, &backup, address, &error), TMS_BACKUP_IO);
            assert_non_null(strstr(error.message, "was changed or truncated"));
            assert_non_null(strstr(error.message, backup.file->path));
            assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), piece / BUFFER);
            assert_filled(address, piece, 5);
            assert_untouched(address, piece, bytes);
            assert_nothing_held();
            change_byte(backup.file->path, places[i], -1);
        }
        assert_loads(f, &backup, address, 5);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

static void a_truncated_file_never_reaches_the_device(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 3 * BUFFER + 100;
    static const uint64_t ends[] = {0, 1, ALIGNMENT, BUFFER - 1, 2 * BUFFER + ALIGNMENT + 7, 3 * BUFFER + 99};
    f->saver.stores.chunk_bytes = BUFFER;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    FOR_EACH_WAY(way) {
        set_way(f, way);
        for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
            tms_error_t error;
            char text[64];
            tms_backup_t backup = prepared(f, bytes);
            fill(address, bytes, 6);
            save_one(f, &backup, address);
            assert_int_equal(truncate(backup.file->path, (off_t)ends[i]), 0);
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

typedef struct asker {
    int asked, release; /* a descriptor that lets requests of the kernel end, or -1 */
} asker_t;

/* The disk stands still until somebody asks whether to stop. */
static int32_t stop_and_release(void *context) {
    asker_t *asker = context;
    const char bytes[IN_FLIGHT_MOST] = {0};
    asker->asked++;
    if (asker->release >= 0) assert_int_equal(write(asker->release, bytes, sizeof bytes), sizeof bytes);
    set_gate(false);
    return 1;
}

static void a_call_stops_while_the_disk_stands_still(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 64 * BUFFER;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    fill(address, bytes, 7);
    FOR_EACH_WAY(way) {
        tms_backup_t backup = prepared(f, bytes);
        set_way(f, way);
        save_one(f, &backup, address);
        int descriptors = count_descriptors();
        for (int saving = 0; saving < 2; saving++) {
            tms_error_t error;
            tms_copier_t copier;
            tms_wait_t wait;
            int ends[2] = {-1, -1};
            if (way == BY_URING) assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
            asker_t asker = {.release = ends[1]};
            fault.pipe_end = ends[0];
            set_gate(true);
            clear_calls();
            if (saving) plan(f, &backup);
            tms_wait_begin(&wait, stop_and_release, &asker, 0);
            open_copier(f, &copier, &wait);
            tms_status_t status = saving ? tms_backup_save(&backup, &copier, address, &CONTEXT, &error)
                                         : tms_backup_load(&backup, &copier, address, &CONTEXT, &error);
            assert_int_equal(status, TMS_INTERRUPTED);
            assert_int_equal(asker.asked, 1);
            assert_int_equal(tms_copier_wait(&copier, &CONTEXT, &error), TMS_INTERRUPTED);
            if (saving) assert_true(simulator()->calls("cuMemcpyDtoHAsync") <= BUFFERS_MOST);
            if (!saving) assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 0);
            if (!saving && way == BY_URING) assert_int_equal(calls.submits, IN_FLIGHT_MOST);
            tms_copier_close(&copier);
            fault.pipe_end = -1;
            /* Giving it back would wait for whatever runs on the device. */
            assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
            tms_saver_reclaim(&f->saver);
            settle_host_memory(&f->saver);
            assert_nothing_held();
            if (ends[0] >= 0) close(ends[0]), close(ends[1]);
            assert_int_equal(count_descriptors(), descriptors);
            assert_filled(address, bytes, 7);
        }
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

static int32_t fork_once(void *context) {
    asker_t *asker = context;
    if (asker->asked++ > 0) return 0;
    pid_t child = fork();
    if (child == 0) {
        clear_calls();
        return 0;
    }
    int ended = -1;
    set_gate(false);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    return 0;
}

/* Its copy of the ring, the threads' requests and the device are the parent's. */
static void a_child_that_is_forked_meanwhile_leaves_everything_alone(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 64 * BUFFER;
    tms_error_t error;
    tms_copier_t copier;
    tms_wait_t wait;
    asker_t asker = {.release = -1};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    tms_backup_t backup = prepared(f, bytes);
    pid_t parent = getpid();
    set_way(f, BY_THREADS);
    fill(address, bytes, 8);
    set_gate(true);
    tms_wait_begin(&wait, fork_once, &asker, 0);
    open_copier(f, &copier, &wait);
    tms_status_t status = tms_backup_save(&backup, &copier, address, &CONTEXT, &error);
    if (getpid() != parent) {
        bool idle = calls.direct_writes + calls.plain_writes + calls.submits + calls.threads == 0;
        end_child(status != TMS_FORKED ? 1 : !idle || simulator()->calls("cuEventSynchronize") > 0 ? 2 : 0);
    }
    ASSERT_OK(status, error);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    tms_backup_commit(&backup, &f->saver.stores);
    assert_true(asker.asked >= 1);
    assert_loads(f, &backup, address, 8);
    tms_backup_destroy(&backup, &f->saver.stores);
}

#define COPIES(test) cmocka_unit_test_setup_teardown(test, setup_disk_copies, teardown_disk_copies)

int main(void) {
    const struct CMUnitTest tests[] = {
        COPIES(contents_of_every_size_make_the_round_trip),
        COPIES(the_ways_are_of_one_file),
        COPIES(a_file_system_in_memory_has_threads),
        COPIES(many_files_share_one_ring),
        COPIES(small_files_keep_the_disk_busy),
        COPIES(reads_do_not_wait_for_one_that_is_late),
        COPIES(what_is_read_goes_on_while_the_disk_stands_still),
        COPIES(buffers_come_back_from_the_device_early),
        COPIES(a_save_does_not_wait_for_its_writes),
        COPIES(a_copier_turns_around),
        COPIES(a_damaged_block_never_reaches_the_device),
        COPIES(a_truncated_file_never_reaches_the_device),
        COPIES(a_call_stops_while_the_disk_stands_still),
        COPIES(a_child_that_is_forked_meanwhile_leaves_everything_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
