/* Guards nvtx.c: what a tool is told, once; that a range's name has the tags that fit; and that a forked child tells
 * nothing. */
#include "base/nvtx.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "nvtx_recorder.h"

int (*InitializeInjectionNvtx2_fnptr)(const void *(*)(uint32_t)) = InitializeInjectionNvtx2;

static tms_nvtx_t *attached(tms_nvtx_t *nvtx) {
    if (!nvtx_recorder_can()) skip(); /* no nvtx3, or one in which a tool must be a library */
    assert_ptr_equal(tms_nvtx_attach(nvtx), nvtx);
    return nvtx;
}

static void the_domain_is_made_once(void **state) {
    (void)state;
    tms_nvtx_t nvtx = {.asked = false};
    (void)attached(&nvtx);
    assert_string_equal(nvtx_recorder_take(), "domain torch_memory_saver\n"
                                              "category 10 call\n"
                                              "category 1 turn\nregister turn\n"
                                              "category 2 synchronize\nregister synchronize\n"
                                              "category 3 plan\nregister plan\n"
                                              "category 4 create\nregister create\n"
                                              "category 5 map\nregister map\n"
                                              "category 6 copy\nregister copy\n"
                                              "category 7 unmap\nregister unmap\n"
                                              "category 8 discard\nregister discard\n"
                                              "category 9 wait\nregister wait\n");
    assert_ptr_equal(tms_nvtx_attach(&nvtx), &nvtx);
    assert_string_equal(nvtx_recorder_take(), "");
}

static void a_name_has_the_tags_that_fit(void **state) {
    (void)state;
    enum { TAG_BYTES = 100 };
    char tag[TAG_BYTES + 1] = {0}, longer[4 * TAG_BYTES + 1] = {0}, expected[1024];
    tms_nvtx_t nvtx = {.asked = false};
    (void)attached(&nvtx);
    memset(tag, 't', TAG_BYTES);
    memset(longer, 'l', 4 * TAG_BYTES);
    const char *const tags[] = {tag, tag, tag}, *const too_long[] = {longer, "kv"};
    (void)nvtx_recorder_take();
    tms_nvtx_push_call(&nvtx, "pause", tags, 3);
    (void)snprintf(expected, sizeof expected, "push 10 - pause %s, %s, ...\n", tag, tag);
    assert_string_equal(nvtx_recorder_take(), expected);
    tms_nvtx_push_call(&nvtx, "pause", too_long, 2);
    assert_string_equal(nvtx_recorder_take(), "push 10 - pause, ...\n");
}

static void a_forked_child_tells_nothing(void **state) {
    (void)state;
    tms_nvtx_t nvtx = {.asked = false};
    (void)attached(&nvtx);
    (void)nvtx_recorder_take();
    tms_nvtx_push_call(&nvtx, "pause", NULL, 0);
    tms_nvtx_after_fork_in_child(&nvtx);
    tms_nvtx_push(&nvtx, TMS_PHASE_TURN, 0); /* the call began in the parent */
    tms_nvtx_pop(&nvtx);
    tms_nvtx_mark(&nvtx, TMS_FORKED, 0);
    tms_nvtx_pop(&nvtx);
    assert_null(tms_nvtx_attach(&nvtx));
    assert_string_equal(nvtx_recorder_take(), "push 10 - pause\n");
}

static void a_child_of_a_parent_that_had_not_asked_asks_itself(void **state) {
    (void)state;
    tms_nvtx_t nvtx = {.asked = false};
    tms_nvtx_after_fork_in_child(&nvtx);
    (void)attached(&nvtx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_domain_is_made_once),
        cmocka_unit_test(a_name_has_the_tags_that_fit),
        cmocka_unit_test(a_forked_child_tells_nothing),
        cmocka_unit_test(a_child_of_a_parent_that_had_not_asked_asks_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
