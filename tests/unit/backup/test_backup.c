/* Guards the interface of the stores: space, contents, undo, and views that outlive them. */

#include "support.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backup/host/block.h"
#include "copies.h"

static const tms_error_context_t CONTEXT = {.operation = "test", .device = 0};
static const tms_backup_kind_t KINDS[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
enum { KIND_COUNT = sizeof KINDS / sizeof *KINDS };

static int32_t go_on(void *context) {
    (void)context;
    return 0;
}

static uint64_t held_bytes(fixture_t *f) {
    return atomic_load(&f->saver.stores.host.buffer_bytes) + atomic_load(&f->saver.stores.disk.total);
}

/* The steps of a pause before it copies. */
static tms_status_t plan(fixture_t *f, tms_backup_t *backup, tms_backup_batch_t *batch, tms_error_t *error) {
    tms_backup_stores_t *stores = &f->saver.stores;
    const tms_backup_request_t request = {.policy = TMS_HOST_RELEASE};
    tms_status_t status = tms_backup_choose(backup, stores, batch, backup->kind, NULL, 0, &CONTEXT, error);
    if (status == TMS_OK) status = tms_backup_plan(backup, stores, batch, &request, &CONTEXT, error);
    return status == TMS_OK ? tms_backup_batch_start(stores, batch, &CONTEXT, error) : status;
}

static void prepare(fixture_t *f, tms_backup_t *backup, tms_copier_t *copier) {
    tms_error_t error;
    tms_backup_batch_t batch = {{NULL}};
    ASSERT_OK(tms_copier_open(copier, &f->saver.stores.copying, 0, NULL, &CONTEXT, &error), error);
    ASSERT_OK(plan(f, backup, &batch, &error), error);
    tms_host_buffer_t *buffer = host_buffer_of(f, backup);
    if (buffer) { /* all of it is usable: the batch is no longer needed */
        uint64_t usable = 0;
        for (uint64_t offset = 0; offset < buffer->bytes; offset += usable)
            ASSERT_OK(tms_host_buffer_await(buffer, offset, NULL, &usable, &CONTEXT, &error), error);
    }
    tms_backup_batch_end(&f->saver.stores, &batch);
}

static uint64_t pinned_bytes(fixture_t *f) {
    tms_sim_usage_t usage;
    tms_host_store_settle(&f->saver.stores.host);
    simulator()->usage(0, &usage);
    return usage.host_bytes;
}

static void contents_round_trip(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 3 * MIB + 17;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    f->saver.stores.disk.staging_bytes = MIB; /* several chunks, the last one odd */
    for (uint32_t i = 0; i < KIND_COUNT; i++) {
        tms_error_t error;
        tms_copier_t copier;
        tms_backup_t backup = {.kind = KINDS[i], .bytes = bytes};
        fill(address, bytes, i);
        prepare(f, &backup, &copier);
        assert_true(held_bytes(f) >= bytes);
        ASSERT_OK(tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        assert_false(backup.saved); /* contents count from the commit on */
        tms_backup_commit(&backup, &f->saver.stores);
        memset((void *)address, 0, bytes);
        ASSERT_OK(tms_backup_load(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        assert_filled(address, bytes, i);
        tms_copier_close(&copier);
        tms_backup_destroy(&backup, &f->saver.stores);
        assert_int_equal(held_bytes(f), 0);
    }
}

static void cancel_undoes_prepare_and_nothing_else(void **state) {
    fixture_t *f = *state;
    for (uint32_t i = 0; i < KIND_COUNT; i++) {
        tms_copier_t copier;
        tms_backup_t backup = {.kind = KINDS[i], .bytes = MIB};
        prepare(f, &backup, &copier);
        tms_backup_cancel(&backup, &f->saver.stores);
        assert_int_equal(held_bytes(f), 0);
        tms_copier_close(&copier);

        prepare(f, &backup, &copier);
        tms_backup_commit(&backup, &f->saver.stores);
        uint64_t held = held_bytes(f);
        tms_copier_close(&copier);
        prepare(f, &backup, &copier); /* a second pause reuses what exists */
        tms_backup_cancel(&backup, &f->saver.stores);
        assert_int_equal(held_bytes(f), held);
        tms_copier_close(&copier);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

static void discard_keeps_what_is_retained_and_the_space_of_files(void **state) {
    fixture_t *f = *state;
    for (uint32_t i = 0; i < KIND_COUNT; i++) {
        tms_copier_t copier;
        tms_backup_t backup = {.kind = KINDS[i], .bytes = MIB};
        bool on_disk = KINDS[i] == TMS_BACKUP_DISK;
        prepare(f, &backup, &copier);
        tms_backup_commit(&backup, &f->saver.stores);
        tms_copier_close(&copier);
        tms_backup_discard(&backup, &f->saver.stores, TMS_HOST_RETAIN);
        assert_true(backup.saved);
        assert_true(held_bytes(f) >= MIB);
        tms_backup_discard(&backup, &f->saver.stores, TMS_HOST_RELEASE);
        assert_false(backup.saved);
        assert_int_equal(held_bytes(f) > 0, on_disk);
        tms_backup_destroy(&backup, &f->saver.stores);
        assert_int_equal(held_bytes(f), 0);
    }
}

static void a_host_buffer_lives_as_long_as_its_last_reference(void **state) {
    fixture_t *f = *state;
    for (uint32_t i = 0; i < 2; i++) {
        tms_copier_t copier;
        tms_backup_t backup = {.kind = KINDS[i], .bytes = MIB};
        prepare(f, &backup, &copier);
        tms_copier_close(&copier);
        tms_backup_commit(&backup, &f->saver.stores);
        tms_host_buffer_t *view = host_buffer_of(f, &backup);
        tms_host_buffer_acquire(view);
        tms_backup_destroy(&backup, &f->saver.stores);
        assert_int_equal(pinned_bytes(f), MIB);
        memset(view->memory, 7, MIB);
        assert_int_equal(held_bytes(f), MIB);
        tms_host_buffer_drop(view);
        assert_int_equal(held_bytes(f), 0);
        assert_int_equal(pinned_bytes(f), 0);
    }
}

static void memory_that_cannot_be_pinned_is_used_unpinned(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    tms_backup_t backup = {.kind = TMS_BACKUP_PINNED, .bytes = 2 * MIB};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    fill(address, 2 * MIB, 3);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    simulator()->fail_after("cuMemHostRegister", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    prepare(f, &backup, &copier);
    assert_int_equal(simulator()->failures_fired(), 1);
    ASSERT_OK(tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    assert_filled((uint64_t)host_buffer_of(f, &backup)->memory, 2 * MIB, 3);
    assert_int_equal(pinned_bytes(f), 0);
    tms_copier_close(&copier);
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* ---- backups of more than 4 GiB, of which only the copied part is ever prefaulted ---- */

static void a_plan_of_more_than_4_gib(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_backup_batch_t batch = {{NULL}};
    const uint64_t address = 16 * GIB, bytes = 8 * GIB;
    const tms_live_range_t ranges[] = {{address, address + 5 * GIB}, {address + 6 * GIB, address + 6 * GIB + MIB}};
    const tms_live_t live = {.allocations = &address, .allocation_count = 1, .ranges = ranges, .range_count = 2};
    tms_backup_t backup = {.kind = TMS_BACKUP_PINNED, .bytes = bytes};
    const tms_backup_request_t request = {.policy = TMS_HOST_RELEASE};
    ASSERT_OK(tms_backup_choose(&backup, &f->saver.stores, &batch, backup.kind, &live, address, &CONTEXT, &error), error);
    ASSERT_OK(tms_backup_plan(&backup, &f->saver.stores, &batch, &request, &CONTEXT, &error), error);
    assert_int_equal(backup.planned.bytes, 5 * GIB + MIB);
    assert_int_equal(host_buffer_of(f, &backup)->bytes, 5 * GIB + MIB);
    assert_int_equal(backup.planned.extent_count, 2);
    assert_int_equal(backup.planned.extents[0].bytes, 5 * GIB);
    assert_int_equal(backup.planned.extents[1].offset, 6 * GIB);
    assert_int_equal(backup.planned.extents[1].packed, 5 * GIB);
    assert_int_equal(backup.planned.extents[1].bytes, MIB);
    tms_backup_batch_end(&f->saver.stores, &batch); /* never started: nothing was mapped */
    tms_backup_cancel(&backup, &f->saver.stores);
    assert_int_equal(held_bytes(f), 0);
}

/* A buffer of one chunk that is usable already, and a backup in which the second extent lies behind 4 GiB. */
static void copies_from_and_to_beyond_4_gib(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    const uint64_t room = 5 * GIB;
    f->saver.stores.host.chunk_bytes = room;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 4 * MIB);
    char *memory = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    tms_host_chunk_t chunk = {.bytes = room, .state = TMS_HOST_CHUNK_USABLE};
    struct tms_host_block block = {.store = &f->saver.stores.host, .memory = memory, .bytes = room, .chunks = &chunk};
    tms_host_buffer_t buffer = {.store = block.store, .block = &block, .memory = memory, .bytes = room, .references = 1};
    tms_extent_t extents[] = {{.offset = 0, .packed = 0, .bytes = MIB},
                              {.offset = 2 * MIB, .packed = 4 * GIB + MIB, .bytes = 2 * MIB}};
    const tms_backup_content_t content = {
        .kind = TMS_BACKUP_MMAP, .bytes = 4 * GIB + 3 * MIB, .extents = extents, .extent_count = 2};
    tms_backup_t backup = {.kind = TMS_BACKUP_MMAP, .bytes = room, .planned = content};
    backup.slots[0].kept = &buffer; /* the host store's */
    fill(address, 4 * MIB, 1);
    ASSERT_OK(tms_copier_open(&copier, &f->saver.stores.copying, 0, NULL, &CONTEXT, &error), error);
    ASSERT_OK(tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    assert_memory_equal(memory, (void *)address, MIB);
    assert_memory_equal(memory + 4 * GIB + MIB, (void *)(address + 2 * MIB), 2 * MIB);

    backup.held = content;
    backup.saved = true;
    assert_ptr_equal(tms_backup_find(&backup, &f->saver.stores, 3 * MIB, MIB, NULL), memory + 4 * GIB + 2 * MIB);
    memset((void *)address, 0, 4 * MIB);
    ASSERT_OK(tms_backup_load(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    assert_filled_part(address, 0, MIB, 1);
    assert_filled_part(address, 2 * MIB, 2 * MIB, 1);
    assert_int_equal(munmap(memory, room), 0);
}

static void mmap_beyond_reason_is_refused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_backup_t backup = {.kind = TMS_BACKUP_MMAP, .bytes = (uint64_t)1 << 60};
    tms_backup_batch_t batch = {{NULL}};
    assert_int_equal(plan(f, &backup, &batch, &error), TMS_OUT_OF_HOST_MEMORY);
    tms_backup_batch_end(&f->saver.stores, &batch);
    tms_backup_cancel(&backup, &f->saver.stores);
    assert_int_equal(held_bytes(f), 0);
}

static void a_copier_leaves_nothing_open(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier = {.open = false};
    tms_sim_usage_t usage;
    tms_copier_close(&copier); /* never opened */
    simulator()->fail_after("cuStreamCreate", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_copier_open(&copier, &f->saver.stores.copying, 0, NULL, &CONTEXT, &error), TMS_DRIVER);
    assert_int_equal(simulator()->calls("cuCtxPushCurrent"), simulator()->calls("cuCtxPopCurrent"));
    ASSERT_OK(tms_copier_open(&copier, &f->saver.stores.copying, 0, NULL, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    simulator()->usage(0, &usage);
    assert_int_equal(usage.streams, 0);
}

/* A stream, two events and a staging buffer: what the driver does not release is quarantined, counted, and released by the
 * next retry. */
static void resources_that_a_copier_cannot_release_are_quarantined(void **state) {
    fixture_t *f = *state;
    const struct {
        const char *call;
        tms_quarantine_kind_t kind;
    } points[] = {{"cuStreamDestroy", TMS_QUARANTINE_OTHER},
                  {"cuEventDestroy", TMS_QUARANTINE_OTHER},
                  {"cuMemHostUnregister", TMS_QUARANTINE_HOST}};
    f->saver.stores.copying.chunk_bytes = f->saver.stores.disk.staging_bytes = MIB;
    tms_log_init(&f->log, TMS_LOG_SILENT);
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        tms_error_t error;
        tms_copier_t copier;
        tms_sim_usage_t usage;
        tms_wait_t wait = {.interrupted = go_on, .polled = tms_wait_now(), .process = getpid()};
        tms_backup_t host = {.kind = TMS_BACKUP_MMAP, .bytes = 3 * MIB}, disk = {.kind = TMS_BACKUP_DISK, .bytes = 3 * MIB};
        uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 4 * MIB);
        ASSERT_OK(tms_copier_open(&copier, &f->saver.stores.copying, 0, &wait, &CONTEXT, &error), error);
        tms_backup_batch_t batches[2] = {{{NULL}}};
        ASSERT_OK(plan(f, &host, &batches[0], &error), error);
        ASSERT_OK(plan(f, &disk, &batches[1], &error), error);
        ASSERT_OK(tms_backup_save(&host, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
        ASSERT_OK(tms_backup_save(&disk, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
        for (int k = 0; k < 2; k++) tms_backup_batch_end(&f->saver.stores, &batches[k]);
        simulator()->fail_after(points[i].call, 0, 1, CUDA_ERROR_UNKNOWN);
        tms_copier_close(&copier);
        assert_int_equal(tms_quarantine_held(&f->saver.quarantine, points[i].kind), 1);
        tms_reclaim_all(&f->saver);
        settle_host_memory(&f->saver);
        assert_true(tms_quarantine_is_empty(&f->saver.quarantine));
        simulator()->usage(0, &usage);
        assert_int_equal(usage.streams, 0);
        tms_backup_destroy(&host, &f->saver.stores);
        tms_backup_destroy(&disk, &f->saver.stores);
        assert_int_equal(pinned_bytes(f), 0);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

static void each_kind_has_a_store(void **state) {
    fixture_t *f = *state;
    const tms_backup_stores_t *stores = &f->saver.stores;
    assert_ptr_equal(tms_backup_stores_find(stores, TMS_BACKUP_PINNED)->store, &stores->host);
    assert_ptr_equal(tms_backup_stores_find(stores, TMS_BACKUP_MMAP)->store, &stores->host);
    assert_ptr_equal(tms_backup_stores_find(stores, TMS_BACKUP_DISK)->store, &stores->disk);
    const int32_t others[] = {TMS_BACKUP_NONE, -1, HEAP_BACKUP + 1, 31, 32, 64, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_null(tms_backup_stores_find(stores, (tms_backup_kind_t)others[i]));
}

/* Whatever fails, nothing is in flight when the copier is closed: the targets of its copies may be released. */
static void a_closed_copier_copies_no_more(void **state) {
    fixture_t *f = *state;
    for (uint64_t failures = 1; failures <= 2; failures++) {
        tms_error_t error;
        tms_copier_t copier;
        tms_backup_t backup = {.kind = TMS_BACKUP_PINNED, .bytes = 2 * MIB};
        uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
        fill(address, 2 * MIB, 1);
        prepare(f, &backup, &copier);
        hold_copies_until_wait(f, (int)failures + 1);
        ASSERT_OK(tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
        simulator()->fail_after("cuStreamSynchronize", 0, failures, CUDA_ERROR_UNKNOWN);
        tms_copier_close(&copier);
        assert_filled((uint64_t)host_buffer_of(f, &backup)->memory, 2 * MIB, 1);
        tms_backup_destroy(&backup, &f->saver.stores);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(contents_round_trip),
        ONE(cancel_undoes_prepare_and_nothing_else),
        ONE(discard_keeps_what_is_retained_and_the_space_of_files),
        ONE(a_host_buffer_lives_as_long_as_its_last_reference),
        ONE(memory_that_cannot_be_pinned_is_used_unpinned),
        ONE(a_plan_of_more_than_4_gib),
        ONE(copies_from_and_to_beyond_4_gib),
        ONE(mmap_beyond_reason_is_refused),
        ONE(a_copier_leaves_nothing_open),
        ONE(resources_that_a_copier_cannot_release_are_quarantined),
        ONE(a_closed_copier_copies_no_more),
        ONE(each_kind_has_a_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
