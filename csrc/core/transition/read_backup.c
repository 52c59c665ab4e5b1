#include "core/transition/read_backup.h"

#include "core/transition/completion.h"
#include "core/transition/steps.h"

typedef struct request {
    tms_transition_t t; /* first */
    uint64_t address, bytes;
    void *destination;
    bool found;
} request_t;

static tms_status_t read_it(tms_transition_t *t, tms_error_t *error) {
    request_t *request = (request_t *)t;
    tms_segment_t *segment = t->planned.first; /* the only one: the call selects by address */
    const uint64_t offset = request->address - tms_segment_address(segment);
    tms_error_context_t context = tms_transition_context_of(t, segment);
    context.bytes = request->bytes;
    tms_status_t status = TMS_OK;
    if (request->bytes > segment->bytes || offset > segment->bytes - request->bytes)
        status = tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "the range goes beyond its allocation of %llu bytes",
                               (unsigned long long)segment->bytes);
    else
        status = tms_backup_read(&segment->backup, &t->saver->stores, offset, request->bytes, request->destination,
                                 &request->found, &t->wait, &context, error);
    tms_completion_finish(t, false);
    return status;
}

tms_status_t tms_read_backup_perform(tms_saver_t *saver, const tms_selection_t *selection, uint64_t address, uint64_t bytes,
                                     void *destination, int32_t *found, tms_error_t *error) {
    request_t request = {.t = {.saver = saver,
                               .requested = {.selection = selection,
                                             .operation = "get_cpu_backup",
                                             .from = TMS_SEGMENT_PAUSED,
                                             .through = TMS_SEGMENT_RESUMING,
                                             .to = TMS_SEGMENT_PAUSED,
                                             .address = address},
                               .act = read_it},
                         .address = address,
                         .bytes = bytes,
                         .destination = destination};
    tms_status_t status = tms_steps_perform(&request.t, error);
    if (status == TMS_OK) *found = request.found;
    return status;
}
