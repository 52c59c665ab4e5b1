#include "core/allocation/orphans.h"

#include <errno.h>
#include <stdlib.h>

/* Addresses that the program has freed. */
struct tms_late_range {
    uint64_t address, bytes;
    struct tms_late_range *next;
};

static tms_error_context_t context_of(uint64_t address, uint64_t bytes) {
    return (tms_error_context_t){.operation = "free", .device = TMS_NO_DEVICE, .bytes = bytes, .address = address};
}

static void log_reserved(const tms_saver_t *saver, const tms_error_t *reason) {
    tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, reason, "The addresses stay reserved.");
}

void tms_orphans_end(tms_saver_t *saver) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    struct tms_late_range *late = NULL;
    pthread_mutex_lock(&saver->lock);
    if (--saver->orphans == 0) {
        late = saver->late_ranges;
        saver->late_ranges = NULL;
    }
    pthread_mutex_unlock(&saver->lock);
    for (struct tms_late_range *next; late; late = next) {
        const tms_error_context_t context = context_of(late->address, late->bytes);
        tms_error_t reason;
        next = late->next;
        if (TMS_DRIVER_CALL(driver, &context, &reason, cuMemAddressFree, late->address, late->bytes) != TMS_OK &&
            !tms_driver_is_gone(&reason))
            log_reserved(saver, &reason);
        free(late);
    }
}

bool tms_orphans_keep(tms_saver_t *saver, uint64_t address, uint64_t bytes) {
    const tms_error_context_t context = context_of(address, bytes);
    struct tms_late_range *late = malloc(sizeof *late);
    pthread_mutex_lock(&saver->lock);
    const bool keep = saver->orphans > 0;
    if (keep && late) {
        *late = (struct tms_late_range){.address = address, .bytes = bytes, .next = saver->late_ranges};
        saver->late_ranges = late;
        late = NULL;
    } else if (keep) {
        tms_error_t reason;
        (void)tms_error_set_os(&reason, &context, "malloc", ENOMEM, NULL);
        log_reserved(saver, &reason);
    }
    pthread_mutex_unlock(&saver->lock);
    free(late);
    return keep;
}
