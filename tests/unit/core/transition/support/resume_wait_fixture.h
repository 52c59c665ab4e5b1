/* Shared by the tests of resumes that wait. The cancellation callback does what other threads do meanwhile, so nothing
 * depends on timing. */
#ifndef TMS_TESTS_RESUME_WAIT_FIXTURE_H
#define TMS_TESTS_RESUME_WAIT_FIXTURE_H

#include "support.h"

#define LONG_SECONDS 1e6

typedef struct others {
    fixture_t *fixture;
    int asked;
    uint64_t give_back;          /* bytes, at the first callback of the wait */
    uint64_t free_address;       /* at the first callback of the wait, or 0 */
    tms_device_locks_t *let_go;  /* of device 0 */
    uint64_t creates_when_asked; /* calls of cuMemCreate until the first callback */
} others_t;

static int32_t ask(void *context) {
    others_t *others = context;
    /* Free memory is queried only after a failed attempt. */
    if (!others->let_go && simulator()->calls("cuMemGetInfo") == 0) return 0;
    if (others->asked++ > 0) return 0;
    others->creates_when_asked = simulator()->calls("cuMemCreate");
    if (others->give_back) assert_int_equal(simulator()->take_memory(0, -(int64_t)others->give_back), 0);
    if (others->free_address)
        assert_int_equal(tms_free_address(&others->fixture->saver, others->free_address, NULL), TMS_OK);
    if (others->let_go) tms_device_locks_release(others->let_go, 1);
    return 0;
}

static tms_selection_t waiting(others_t *others, double seconds) {
    return (tms_selection_t){.interrupted = ask, .interrupt_context = others, .timeout_seconds = seconds};
}

#endif
