/* Guards the pieces of contents, of which each has a fingerprint: as many are counted as there are. */

#include "backup/fingerprints.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h> /* needs all of the above */

enum { CHUNK = TMS_FINGERPRINT_CHUNK_BYTES, VECTOR = TMS_FINGERPRINT_VECTOR_BYTES };

/* Asserts that the pieces cover the extent, and that the whole vectors of each fit a chunk. Returns their number. */
static uint64_t walk(const tms_extent_t *extent) {
    uint64_t count = 0;
    tms_extent_t piece;
    for (uint64_t done = 0; done < extent->bytes; done += piece.bytes, count++) {
        piece = tms_fingerprints_chunk(extent, done);
        assert_int_equal(piece.offset, extent->offset + done);
        assert_int_equal(piece.packed, extent->packed + done);
        assert_true(piece.bytes > 0 && piece.bytes <= extent->bytes - done);
        const uint64_t begin = piece.offset / VECTOR * VECTOR;
        const uint64_t end = (piece.offset + piece.bytes + VECTOR - 1) / VECTOR * VECTOR;
        assert_true(end - begin <= CHUNK);
        assert_true(done == 0 || piece.offset % VECTOR == 0);
    }
    return count;
}

static void the_pieces_of_any_range_are_counted(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1, VECTOR, CHUNK - VECTOR, CHUNK, 3 * CHUNK};
    for (uint64_t offset = 0; offset <= 2 * VECTOR; offset++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            for (uint64_t more = 0; more <= VECTOR; more++) {
                tms_extent_t extents[] = {{offset, 0, sizes[i] + more},
                                          {offset + 4 * CHUNK + VECTOR + more, sizes[i] + more, sizes[i]}};
                const tms_backup_content_t content = {.bytes = 2 * sizes[i] + more, .extents = extents, .extent_count = 2};
                assert_int_equal(tms_fingerprints_count(&content), walk(&extents[0]) + walk(&extents[1]));
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_pieces_of_any_range_are_counted)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
