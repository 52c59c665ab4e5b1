/* Guards backup/disk/uring_abi.h: its layouts and numbers are those of the kernel's header. */
#include "support.h"

#include <linux/io_uring.h>

#include "backup/disk/uring_abi.h"

typedef struct io_uring_sqe sqe_t;
typedef struct io_uring_cqe cqe_t;
typedef struct io_uring_params params_t;
typedef struct io_uring_getevents_arg getevents_t;

#define SAME_SIZE(ours, theirs) assert_int_equal(sizeof(ours), sizeof(theirs))
#define SAME_FIELD(ours, our_field, theirs, their_field)                                                                    \
    do {                                                                                                                    \
        assert_int_equal(offsetof(ours, our_field), offsetof(theirs, their_field));                                         \
        assert_int_equal(sizeof(((ours *)0)->our_field), sizeof(((theirs *)0)->their_field));                               \
    } while (0)

static void layouts_are_the_kernels(void **state) {
    (void)state;
    SAME_SIZE(tms_uring_entry_t, sqe_t);
    SAME_FIELD(tms_uring_entry_t, opcode, sqe_t, opcode);
    SAME_FIELD(tms_uring_entry_t, fd, sqe_t, fd);
    SAME_FIELD(tms_uring_entry_t, offset, sqe_t, off);
    SAME_FIELD(tms_uring_entry_t, address, sqe_t, addr);
    SAME_FIELD(tms_uring_entry_t, bytes, sqe_t, len);
    SAME_FIELD(tms_uring_entry_t, user_data, sqe_t, user_data);
    SAME_SIZE(tms_uring_completion_t, cqe_t);
    SAME_FIELD(tms_uring_completion_t, user_data, cqe_t, user_data);
    SAME_FIELD(tms_uring_completion_t, result, cqe_t, res);
    SAME_SIZE(tms_uring_wait_t, getevents_t);
    SAME_FIELD(tms_uring_wait_t, limit, getevents_t, ts);
}

static void parameters_are_the_kernels(void **state) {
    (void)state;
    SAME_SIZE(tms_uring_parameters_t, params_t);
    SAME_FIELD(tms_uring_parameters_t, submission_entries, params_t, sq_entries);
    SAME_FIELD(tms_uring_parameters_t, completion_entries, params_t, cq_entries);
    SAME_FIELD(tms_uring_parameters_t, features, params_t, features);
    SAME_FIELD(tms_uring_parameters_t, submission.tail, params_t, sq_off.tail);
    SAME_FIELD(tms_uring_parameters_t, submission.mask, params_t, sq_off.ring_mask);
    SAME_FIELD(tms_uring_parameters_t, submission.array, params_t, sq_off.array);
    SAME_FIELD(tms_uring_parameters_t, completion.head, params_t, cq_off.head);
    SAME_FIELD(tms_uring_parameters_t, completion.tail, params_t, cq_off.tail);
    SAME_FIELD(tms_uring_parameters_t, completion.mask, params_t, cq_off.ring_mask);
    SAME_FIELD(tms_uring_parameters_t, completion.completions, params_t, cq_off.cqes);
}

static void numbers_are_the_kernels(void **state) {
    (void)state;
    assert_int_equal(TMS_URING_READ, IORING_OP_READ);
    assert_int_equal(TMS_URING_WRITE, IORING_OP_WRITE);
    assert_int_equal(TMS_URING_SINGLE_MMAP, IORING_FEAT_SINGLE_MMAP);
    assert_int_equal(TMS_URING_NODROP, IORING_FEAT_NODROP);
    assert_int_equal(TMS_URING_EXT_ARG, IORING_FEAT_EXT_ARG);
    assert_int_equal(TMS_URING_ENTER_GETEVENTS, IORING_ENTER_GETEVENTS);
    assert_int_equal(TMS_URING_ENTER_EXT_ARG, IORING_ENTER_EXT_ARG);
    assert_int_equal(TMS_URING_RINGS, IORING_OFF_SQ_RING);
    assert_int_equal(TMS_URING_ENTRIES, IORING_OFF_SQES);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_are_the_kernels),
        cmocka_unit_test(parameters_are_the_kernels),
        cmocka_unit_test(numbers_are_the_kernels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
