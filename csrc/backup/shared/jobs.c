#include "backup/shared/jobs.h"

#include <errno.h>
#include <stdlib.h>

tms_status_t tms_shared_jobs_add(tms_shared_jobs_t *jobs, tms_shared_part_t *part, CUdeviceptr address,
                                 const tms_error_context_t *context, tms_error_t *error) {
    enum { FIRST_CAPACITY = 16 };
    if (jobs->count == jobs->capacity) {
        const size_t capacity = jobs->capacity ? 2 * jobs->capacity : FIRST_CAPACITY;
        tms_shared_job_t *grown = realloc(jobs->list, capacity * sizeof *grown);
        if (!grown) return tms_error_set_os(error, context, "realloc", ENOMEM, NULL);
        jobs->list = grown;
        jobs->capacity = capacity;
    }
    jobs->list[jobs->count++] = (tms_shared_job_t){.part = part, .address = address, .context = *context};
    return TMS_OK;
}

void tms_shared_jobs_free(tms_shared_jobs_t *jobs) {
    free(jobs->list);
    *jobs = (tms_shared_jobs_t){0};
}
