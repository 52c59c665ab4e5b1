#include "core/transition/reading.h"

#include "core/transition/completion.h"
#include "core/transition/transition.h"

typedef struct reading {
    tms_transition_t t; /* first */
    uint64_t address, bytes;
    void *destination;
    bool found;
} reading_t;

static tms_status_t read_it(tms_transition_t *t, tms_error_t *error) {
    reading_t *reading = (reading_t *)t;
    tms_segment_t *segment = t->planned.first; /* the only one: the call selects by address */
    const uint64_t offset = reading->address - tms_segment_address(segment);
    tms_error_context_t context = tms_transition_context_of(t, segment);
    context.bytes = reading->bytes;
    tms_status_t status = TMS_OK;
    if (reading->bytes > segment->bytes || offset > segment->bytes - reading->bytes)
        status = tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "the range goes beyond its allocation of %llu bytes",
                               (unsigned long long)segment->bytes);
    else
        status = tms_backup_read(&segment->backup, &t->saver->stores, offset, reading->bytes, reading->destination,
                                 &reading->found, &t->wait, &context, error);
    tms_transition_finish(t, false);
    return status;
}

tms_status_t tms_transition_read(tms_saver_t *saver, const tms_selection_t *selection, uint64_t address, uint64_t bytes,
                                 void *destination, int32_t *found, tms_error_t *error) {
    tms_calls_t calls = {0}; /* not counted */
    reading_t reading = {.t = {.saver = saver,
                               .asked = {.selection = selection,
                                         .operation = "get_cpu_backup",
                                         .from = TMS_SEGMENT_PAUSED,
                                         .through = TMS_SEGMENT_RESUMING,
                                         .to = TMS_SEGMENT_PAUSED,
                                         .address = address},
                               .act = read_it},
                         .address = address,
                         .bytes = bytes,
                         .destination = destination};
    tms_status_t status = tms_transition_run(&reading.t, &calls, NULL, error);
    if (status == TMS_OK) *found = reading.found;
    return status;
}
