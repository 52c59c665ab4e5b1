#include "simulator/memory/fault.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "simulator/base/state.h"

enum { CLOCK_TEXT_BYTES = 16 };

static double seconds_of(clockid_t clock) {
    static const double nanosecond = 1e-9;
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * nanosecond;
}

/* The local time of day of a moment that was `seconds` ago. */
static void write_time_of_day(double seconds, char *text) {
    time_t moment = (time_t)(seconds_of(CLOCK_REALTIME) - seconds);
    struct tm parts;
    localtime_r(&moment, &parts);
    strftime(text, CLOCK_TEXT_BYTES, "%H:%M:%S", &parts);
}

bool sim_fault_describe(const char *what, uint64_t address, char *text) {
    const tms_api_t *manager = atomic_load(&sim_state.manager);
    tms_segment_info_t row = {.state = TMS_SEGMENT_ACTIVE};
    if (!manager || manager->find(address, &row) != TMS_OK || row.state == TMS_SEGMENT_ACTIVE) {
        snprintf(text, SIM_ACCESS_BYTES, "%s accesses 0x%" PRIx64 ", where its device has no memory", what, address);
        return false;
    }
    char time_of_day[CLOCK_TEXT_BYTES];
    double ago = seconds_of(CLOCK_MONOTONIC) - row.changed_at;
    write_time_of_day(ago, time_of_day);
    snprintf(text, SIM_ACCESS_BYTES,
             "%s accesses 0x%" PRIx64
             " in memory of the tag '%s', which was paused %.3f s before, at %s; resume the tag first",
             what, address, row.tag, ago, time_of_day);
    return true;
}

void sim_fault_report(const char *what, uint64_t address) {
    char text[SIM_ACCESS_BYTES];
    pthread_mutex_unlock(&sim_state.lock);
    (void)sim_fault_describe(what, address, text);
    fprintf(stderr, "simulated GPU: %s\n", text);
    pthread_mutex_lock(&sim_state.lock);
    if (!sim_state.fault[0])
        snprintf(sim_state.fault, sizeof sim_state.fault, "an illegal memory access was encountered: %s", text);
}
