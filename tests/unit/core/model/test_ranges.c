/* Guards the reservation of address ranges: one that another thread has made unnecessary meanwhile, and one that the driver
 * refuses. */

#include "support.h"

#include <stdlib.h>

#include "core/allocation/free.h"
#include "core/model/kinds.h"
#include "core/model/ranges.h"

enum { FIRST = 2, SEGMENTS = FIRST + 2 };

static const uint64_t SMALL = 2 * MIB;

/* Of the one test: what the driver does in the middle of a call. */
static struct {
    fixture_t *fixture;
    tms_segment_t *meanwhile; /* which another thread gives addresses then */
} during;

static void give_addresses(fixture_t *f, tms_segment_t *segment, const tms_driver_table_t *driver) {
    const tms_error_context_t context = {.operation = "test", .device = 0};
    tms_error_t error;
    ASSERT_OK(tms_ranges_take(&f->saver, segment, SMALL, driver, &context, &error), error);
}

static CUresult reserve_late(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    give_addresses(during.fixture, during.meanwhile, during.fixture->cuda);
    return during.fixture->cuda->cuMemAddressReserve(address, bytes, alignment, hint, flags);
}

static tms_segment_t *make_segment(fixture_t *f) {
    tms_segment_t *segment = calloc(1, sizeof *segment);
    tms_error_t error;
    assert_non_null(segment);
    ASSERT_OK(tms_tag_intern(&f->regions.tags, "a", &segment->tag, &error), error);
    segment->bytes = segment->backup.bytes = SMALL;
    return segment;
}

static void a_range_that_is_not_needed_any_more_goes_back(void **state) {
    fixture_t *f = *state;
    tms_segment_t *segments[SEGMENTS];
    for (int i = 0; i < SEGMENTS; i++) segments[i] = make_segment(f);
    for (int i = 0; i < FIRST; i++) give_addresses(f, segments[i], f->cuda);
    during.fixture = f;
    during.meanwhile = segments[FIRST]; /* its range has room for one more */
    tms_driver_table_t late = *f->cuda;
    late.cuMemAddressReserve = reserve_late;
    give_addresses(f, segments[FIRST + 1], &late);
    assert_ptr_equal(segments[FIRST + 1]->span->range, segments[FIRST]->span->range);
    assert_int_equal(f->saver.kinds->space.reserved_bytes, SEGMENTS * SMALL);
    for (int i = 0; i < SEGMENTS; i++) (void)tms_free_release_segment(&f->saver, segments[i], tms_quiesced_without_users());
    assert_int_equal(simulator()->calls("cuMemAddressFree"), simulator()->calls("cuMemAddressReserve"));
}

/* A range for several segments is as large as all others together. */
static void a_refused_range_is_tried_with_the_size_of_the_segment(void **state) {
    fixture_t *f = *state;
    tms_segment_t *segments[FIRST + 1];
    for (int i = 0; i <= FIRST; i++) segments[i] = make_segment(f);
    for (int i = 0; i < FIRST; i++) give_addresses(f, segments[i], f->cuda);
    assert_int_equal(tms_space_growth(&f->saver.kinds->space, SMALL), FIRST * SMALL);
    simulator()->fail_after("cuMemAddressReserve", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    give_addresses(f, segments[FIRST], f->cuda);
    assert_int_equal(simulator()->failures_fired(), 1);
    assert_int_equal(f->saver.kinds->space.reserved_bytes, (FIRST + 1) * SMALL);
    for (int i = 0; i <= FIRST; i++) (void)tms_free_release_segment(&f->saver, segments[i], tms_quiesced_without_users());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_range_that_is_not_needed_any_more_goes_back, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_refused_range_is_tried_with_the_size_of_the_segment, setup_one_device, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
