/* The objects that one device's part of a call moves through a ring. Owned by the relay of its copier; no lock. */
#ifndef TMS_SHARED_JOBS_H
#define TMS_SHARED_JOBS_H

#include "backup/shared/types.h"

typedef struct tms_shared_job {
    tms_shared_part_t *part;
    CUdeviceptr address; /* of the contents */
    tms_error_context_t context;
    bool done;
    bool claimed;  /* this process has to write it */
    uint64_t seen; /* bytes that its other writer had when it was looked at last */
    int polls;     /* consecutive polls that found the same number of written bytes */
} tms_shared_job_t;

/* Zeros: none. */
typedef struct tms_shared_jobs {
    tms_shared_job_t *list;
    size_t count, capacity;
} tms_shared_jobs_t;

/* Appends a job for the part, whose contents lie at `address`. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_shared_jobs_add(tms_shared_jobs_t *jobs, tms_shared_part_t *part, CUdeviceptr address,
                                 const tms_error_context_t *context, tms_error_t *error);
void tms_shared_jobs_free(tms_shared_jobs_t *jobs);

#endif
