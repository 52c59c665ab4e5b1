/* Guards the list of captures: announced ones, ones seen to begin on a stream, and the match of ends to captures. */

#include "support.h"

static const tms_error_context_t CONTEXT = {.operation = "test", .device = TMS_NO_DEVICE};

static uint64_t announce(tms_capture_t *capture, const tms_region_t *region) {
    tms_error_t error;
    uint64_t identity = 0;
    ASSERT_OK(tms_capture_begin(capture, region, &identity, &CONTEXT, &error), error);
    assert_int_not_equal(identity, 0);
    return identity;
}

static tms_capture_stream_t stream_of(uintptr_t key) { return (tms_capture_stream_t){.key = key, .device = TMS_NO_DEVICE}; }

typedef enum expected { NEW_CAPTURE, KNOWN_CAPTURE } expected_t;

static uint64_t begin_on(tms_capture_t *capture, uintptr_t key, expected_t expected) {
    const tms_capture_stream_t where = stream_of(key);
    tms_error_t error;
    uint64_t identity = 0;
    bool known = expected != KNOWN_CAPTURE;
    ASSERT_OK(tms_capture_begin_on(capture, &where, &identity, &known, &CONTEXT, &error), error);
    assert_int_not_equal(identity, 0);
    assert_int_equal(known, expected == KNOWN_CAPTURE);
    return identity;
}

static void captures_nest_and_end_in_pairs(void **state) {
    (void)state;
    tms_capture_t capture;
    tms_region_t region, outer = {.managed = true, .backup = TMS_BACKUP_PINNED};
    tms_capture_init(&capture);
    assert_false(tms_capture_end_last(&capture));
    assert_false(tms_capture_settings(&capture, &region));
    announce(&capture, &outer);
    announce(&capture, NULL);
    assert_int_equal(tms_capture_visible(&capture), 2);
    assert_true(tms_capture_settings(&capture, &region)); /* the inner one has none: the outer one's settings apply */
    assert_int_equal(region.backup, TMS_BACKUP_PINNED);
    assert_true(tms_capture_end_last(&capture));
    assert_true(tms_capture_end_last(&capture));
    assert_false(tms_capture_end_last(&capture));
    assert_int_equal(tms_capture_visible(&capture), 0);
}

static void too_many_captures_are_an_error_and_change_nothing(void **state) {
    (void)state;
    tms_capture_t capture;
    tms_error_t error;
    uint64_t identity = 0;
    bool known = false;
    const tms_capture_stream_t where = stream_of(1);
    tms_capture_init(&capture);
    for (int i = 0; i < TMS_CAPTURE_MAX_NESTED; i++) begin_on(&capture, (uintptr_t)i + 2, NEW_CAPTURE);
    assert_int_equal(tms_capture_begin(&capture, NULL, &identity, &CONTEXT, &error), TMS_INVALID_STATE);
    assert_int_equal(tms_capture_begin_on(&capture, &where, &identity, &known, &CONTEXT, &error), TMS_INVALID_STATE);
    assert_int_equal(identity, 0);
    assert_int_equal(tms_capture_visible(&capture), TMS_CAPTURE_MAX_NESTED);
}

static void an_end_matches_its_own_begin(void **state) {
    (void)state;
    tms_capture_t capture;
    tms_region_t region, first = {.managed = true, .backup = TMS_BACKUP_PINNED},
                         second = {.managed = true, .backup = TMS_BACKUP_DISK};
    tms_capture_init(&capture);
    uint64_t one = announce(&capture, &first), other = announce(&capture, &second);
    assert_int_not_equal(one, other);
    assert_true(tms_capture_end(&capture, one)); /* not the last */
    assert_true(tms_capture_settings(&capture, &region));
    assert_int_equal(region.backup, TMS_BACKUP_DISK);
    assert_false(tms_capture_end(&capture, one)); /* once */
    assert_false(tms_capture_end(&capture, 0));
    assert_true(tms_capture_end(&capture, other));
    assert_false(tms_capture_settings(&capture, &region));
}

/* cuda_graph() announces, and then the capture is seen to begin: that is one capture, whichever part ends first. */
static void a_capture_announced_and_begun_counts_once(void **state) {
    (void)state;
    tms_region_t region, settings = {.managed = true};
    for (int announced_first = 0; announced_first < 2; announced_first++) {
        tms_capture_t capture;
        tms_capture_init(&capture);
        uint64_t announced = announce(&capture, &settings), begun = begin_on(&capture, 7, NEW_CAPTURE);
        assert_int_not_equal(announced, begun);
        assert_int_equal(tms_capture_visible(&capture), 1);
        assert_true(tms_capture_end(&capture, announced_first ? announced : begun));
        assert_int_equal(tms_capture_visible(&capture), 1);
        assert_int_equal(tms_capture_settings(&capture, &region), !announced_first);
        assert_true(tms_capture_end(&capture, announced_first ? begun : announced));
        assert_int_equal(tms_capture_visible(&capture), 0);
    }
}

static void *announce_there(void *argument) {
    announce(argument, NULL);
    return NULL;
}

static void a_capture_announced_by_another_thread_is_another_capture(void **state) {
    (void)state;
    tms_capture_t capture;
    pthread_t thread;
    tms_capture_init(&capture);
    assert_int_equal(pthread_create(&thread, NULL, announce_there, &capture), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    begin_on(&capture, 7, NEW_CAPTURE);
    begin_on(&capture, 8, NEW_CAPTURE);
    assert_int_equal(tms_capture_visible(&capture), 3);
}

static void a_stream_has_one_capture(void **state) {
    (void)state;
    tms_capture_t capture;
    tms_capture_init(&capture);
    uint64_t first = begin_on(&capture, 7, NEW_CAPTURE), other = begin_on(&capture, 8, NEW_CAPTURE);
    assert_int_equal(begin_on(&capture, 7, KNOWN_CAPTURE), first);
    assert_int_equal(tms_capture_visible(&capture), 2);
    assert_int_equal(tms_capture_find(&capture, 8), other);
    assert_int_equal(tms_capture_find(&capture, 9), 0);
    assert_true(tms_capture_end(&capture, first));
    assert_int_equal(tms_capture_find(&capture, 7), 0);
    assert_true(tms_capture_end_last(&capture)); /* where nothing was announced */
    assert_int_equal(tms_capture_visible(&capture), 0);
}

static bool is_seven(void *asked, const tms_capture_stream_t *where) {
    ++*(int *)asked;
    return where->key == 7;
}

static void an_ended_capture_is_dropped_whole(void **state) {
    (void)state;
    tms_capture_t capture;
    int asked = 0;
    tms_capture_init(&capture);
    uint64_t announced = announce(&capture, NULL);
    begin_on(&capture, 7, NEW_CAPTURE);
    begin_on(&capture, 8, NEW_CAPTURE);
    announce(&capture, NULL); /* has no stream to query */
    assert_int_equal(tms_capture_drop(&capture, is_seven, &asked), 1);
    assert_int_equal(asked, 2);
    assert_int_equal(tms_capture_visible(&capture), 2);
    assert_false(tms_capture_end(&capture, announced));
    assert_int_not_equal(tms_capture_find(&capture, 8), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(captures_nest_and_end_in_pairs),
        cmocka_unit_test(too_many_captures_are_an_error_and_change_nothing),
        cmocka_unit_test(an_end_matches_its_own_begin),
        cmocka_unit_test(a_capture_announced_and_begun_counts_once),
        cmocka_unit_test(a_capture_announced_by_another_thread_is_another_capture),
        cmocka_unit_test(a_stream_has_one_capture),
        cmocka_unit_test(an_ended_capture_is_dropped_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
