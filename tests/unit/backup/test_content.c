/* Guards which parts of a segment a backup keeps: neighbouring live ranges are one extent, and a shared backup has each
 * block alone, cut into objects. */

#include "backup/content.h"
#include "include/tms_fingerprint.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h> /* needs all of the above */

enum { VECTOR = TMS_FINGERPRINT_VECTOR_BYTES, MAX_RANGES = 8 };
static const uint64_t ADDRESS = (uint64_t)1 << 40, KIB = 1024, MIB = 1024 * 1024;
static const tms_error_context_t CONTEXT = {.operation = "test", .device = 0};

/* What is live in the segment at ADDRESS, by offsets. */
typedef struct blocks {
    uint64_t ends[MAX_RANGES][3]; /* begin, end, end of what was requested */
    size_t count;
} blocks_t;

typedef enum known { RANGES, RANGES_AND_USED } known_t;

static tms_backup_content_t choose(tms_backup_kind_t kind, const blocks_t *blocks, known_t known, uint64_t bytes) {
    tms_live_range_t ranges[MAX_RANGES];
    uint64_t used[MAX_RANGES];
    tms_backup_content_t content;
    tms_error_t error;
    for (size_t i = 0; i < blocks->count; i++) {
        ranges[i] = (tms_live_range_t){ADDRESS + blocks->ends[i][0], ADDRESS + blocks->ends[i][1]};
        used[i] = ADDRESS + blocks->ends[i][2];
    }
    const tms_live_t live = {.allocations = &ADDRESS,
                             .allocation_count = 1,
                             .ranges = ranges,
                             .range_count = blocks->count,
                             .used = known == RANGES_AND_USED ? used : NULL};
    assert_int_equal(tms_backup_content_choose(&content, kind, &live, ADDRESS, bytes, &CONTEXT, &error), TMS_OK);
    return content;
}

/* Asserts offsets and sizes of the extents, which are packed without gaps, and frees them. */
static void assert_extents(tms_backup_content_t *content, const uint64_t (*expected)[2], size_t count) {
    uint64_t packed = 0;
    assert_non_null(content->extents);
    assert_int_equal(content->extent_count, count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(content->extents[i].offset, expected[i][0]);
        assert_int_equal(content->extents[i].bytes, expected[i][1]);
        assert_int_equal(content->extents[i].packed, packed);
        packed += expected[i][1];
    }
    assert_int_equal(content->bytes, packed);
    tms_backup_content_forget(content);
}

/* Two neighbours, and a block of which a part was requested. */
static const blocks_t THREE = {
    .ends = {{0, 4096, 4096}, {4096, 8192, 5000}, {12288, 16384, 12300}},
    .count = 3,
};

static void neighbours_are_one_extent(void **state) {
    (void)state;
    static const uint64_t expected[][2] = {{0, 8192}, {12288, 4096}};
    static const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        for (known_t known = RANGES; known <= RANGES_AND_USED; known++) {
            tms_backup_content_t content = choose(kinds[i], &THREE, known, 2 * MIB);
            assert_extents(&content, expected, 2);
        }
    }
}

static void a_shared_backup_has_each_block_at_its_requested_size(void **state) {
    (void)state;
    static const uint64_t requested[][2] = {{0, 4096}, {4096, 904}, {12288, 12}};
    static const uint64_t whole[][2] = {{0, 4096}, {4096, 4096}, {12288, 4096}};
    tms_backup_content_t content = choose(TMS_BACKUP_SHARED, &THREE, RANGES_AND_USED, 2 * MIB);
    assert_extents(&content, requested, 3);
    content = choose(TMS_BACKUP_SHARED, &THREE, RANGES, 2 * MIB);
    assert_extents(&content, whole, 3);
}

static void all_blocks_of_a_full_segment_stay_apart(void **state) {
    (void)state;
    const blocks_t full = {.ends = {{0, MIB, MIB}, {MIB, 2 * MIB, 2 * MIB}}, .count = 2};
    const uint64_t expected[][2] = {{0, MIB}, {MIB, MIB}};
    tms_backup_content_t content = choose(TMS_BACKUP_SHARED, &full, RANGES_AND_USED, 2 * MIB);
    assert_extents(&content, expected, 2);
    content = choose(TMS_BACKUP_PINNED, &full, RANGES_AND_USED, 2 * MIB);
    assert_null(content.extents);
    assert_int_equal(content.bytes, 2 * MIB);
}

static void a_large_block_is_cut(void **state) {
    (void)state;
    const uint64_t most = TMS_MAX_OBJECT_BYTES, begin = 2 * MIB, size = 2 * most + MIB + 5;
    const blocks_t large = {.ends = {{begin, begin + size + 100, begin + size}}, .count = 1};
    const uint64_t expected[][2] = {
        {begin, most}, {begin + most, most}, {begin + 2 * most, MIB}, {begin + 2 * most + MIB, 5}};
    tms_backup_content_t content = choose(TMS_BACKUP_SHARED, &large, RANGES_AND_USED, 1024 * MIB);
    assert_extents(&content, expected, 4);
}

/* A piece that is no object is not cut. */
static void only_an_object_has_its_last_bytes_cut_off(void **state) {
    (void)state;
    const uint64_t least = TMS_MIN_OBJECT_BYTES;
    const blocks_t small = {.ends = {{0, MIB, least - 1}}, .count = 1}, exact = {.ends = {{0, MIB, least}}, .count = 1},
                   more = {.ends = {{0, MIB, least + VECTOR - 1}}, .count = 1};
    const uint64_t of_small[][2] = {{0, least - 1}}, of_exact[][2] = {{0, least}},
                   of_more[][2] = {{0, least}, {least, VECTOR - 1}};
    tms_backup_content_t content = choose(TMS_BACKUP_SHARED, &small, RANGES_AND_USED, 2 * MIB);
    assert_false(tms_extent_is_object(content.extents));
    assert_extents(&content, of_small, 1);
    content = choose(TMS_BACKUP_SHARED, &exact, RANGES_AND_USED, 2 * MIB);
    assert_true(tms_extent_is_object(content.extents));
    assert_extents(&content, of_exact, 1);
    content = choose(TMS_BACKUP_SHARED, &more, RANGES_AND_USED, 2 * MIB);
    assert_extents(&content, of_more, 2);
}

static void a_piece_of_64_mib_and_less_than_a_vector(void **state) {
    (void)state;
    const uint64_t most = TMS_MAX_OBJECT_BYTES;
    const blocks_t block = {.ends = {{0, 2 * most, most + 3}}, .count = 1};
    const uint64_t expected[][2] = {{0, most}, {most, 3}};
    tms_backup_content_t content = choose(TMS_BACKUP_SHARED, &block, RANGES_AND_USED, 2 * most);
    assert_extents(&content, expected, 2);
}

/* Objects begin and end at a vector wherever a block lies. */
static void a_block_that_does_not_begin_at_a_vector(void **state) {
    (void)state;
    const uint64_t least = TMS_MIN_OBJECT_BYTES;
    const blocks_t block = {.ends = {{3, 2 * MIB, 16 + least + 7}, {2 * MIB + 5, 2 * MIB + 9, 2 * MIB + 8}}, .count = 2};
    const uint64_t expected[][2] = {{3, 13}, {16, least}, {16 + least, 7}, {2 * MIB + 5, 3}};
    tms_backup_content_t content = choose(TMS_BACKUP_SHARED, &block, RANGES_AND_USED, 4 * MIB);
    assert_extents(&content, expected, 4);
}

static void blocks_that_are_unknown_are_one(void **state) {
    (void)state;
    const uint64_t most = TMS_MAX_OBJECT_BYTES, bytes = most + 2 * MIB + 1, elsewhere = ADDRESS + 1;
    const uint64_t expected[][2] = {{0, most}, {most, 2 * MIB}, {most + 2 * MIB, 1}};
    const tms_live_t other = {.allocations = &elsewhere, .allocation_count = 1};
    const tms_live_t *const lives[] = {NULL, &other};
    for (size_t i = 0; i < 2; i++) {
        tms_backup_content_t content;
        tms_error_t error;
        assert_int_equal(tms_backup_content_choose(&content, TMS_BACKUP_SHARED, lives[i], ADDRESS, bytes, &CONTEXT, &error),
                         TMS_OK);
        assert_extents(&content, expected, 3);
    }
}

/* The segment is a part of what a list of blocks describes. */
static void blocks_are_clipped_to_the_segment(void **state) {
    (void)state;
    const blocks_t blocks = {.ends = {{MIB, 3 * MIB, 3 * MIB}, {3 * MIB, 4 * MIB, 4 * MIB}}, .count = 2};
    const uint64_t expected[][2] = {{MIB, MIB - 16}};
    tms_backup_content_t content = choose(TMS_BACKUP_SHARED, &blocks, RANGES_AND_USED, 2 * MIB - 16);
    assert_extents(&content, expected, 1);
}

static void nothing_is_live(void **state) {
    (void)state;
    const blocks_t none = {.count = 0}, behind = {.ends = {{0, MIB, 512 * KIB}}, .count = 1};
    tms_backup_content_t content = choose(TMS_BACKUP_SHARED, &none, RANGES_AND_USED, 2 * MIB);
    assert_null(content.extents);
    assert_int_equal(content.bytes, 0);
    content = choose(TMS_BACKUP_NONE, &behind, RANGES_AND_USED, 2 * MIB);
    assert_null(content.extents);
    assert_int_equal(content.bytes, 0);
}

/* Equal blocks at other places are no reason to take what was kept for what is to be kept. */
static void contents_with_other_borders_do_not_match(void **state) {
    (void)state;
    const blocks_t one = {.ends = {{0, 2 * MIB, 2 * MIB}}, .count = 1},
                   two = {.ends = {{0, MIB, MIB}, {MIB, 2 * MIB, 2 * MIB}}, .count = 2};
    tms_backup_content_t a = choose(TMS_BACKUP_SHARED, &one, RANGES_AND_USED, 2 * MIB);
    tms_backup_content_t b = choose(TMS_BACKUP_SHARED, &two, RANGES_AND_USED, 2 * MIB);
    tms_backup_content_t again = choose(TMS_BACKUP_SHARED, &two, RANGES_AND_USED, 2 * MIB);
    assert_false(tms_backup_contents_match(&a, &b));
    assert_true(tms_backup_contents_match(&b, &again));
    tms_backup_content_forget(&a);
    tms_backup_content_forget(&b);
    tms_backup_content_forget(&again);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(neighbours_are_one_extent),
        cmocka_unit_test(a_shared_backup_has_each_block_at_its_requested_size),
        cmocka_unit_test(all_blocks_of_a_full_segment_stay_apart),
        cmocka_unit_test(a_large_block_is_cut),
        cmocka_unit_test(only_an_object_has_its_last_bytes_cut_off),
        cmocka_unit_test(a_piece_of_64_mib_and_less_than_a_vector),
        cmocka_unit_test(a_block_that_does_not_begin_at_a_vector),
        cmocka_unit_test(blocks_that_are_unknown_are_one),
        cmocka_unit_test(blocks_are_clipped_to_the_segment),
        cmocka_unit_test(nothing_is_live),
        cmocka_unit_test(contents_with_other_borders_do_not_match),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
