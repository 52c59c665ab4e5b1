/* Counters. Each is updated with relaxed atomics where the counted event happens, and may be read at any time on any thread.
 * Derived numbers (damaged, quarantined, deferred) are computed by tms_saver_counters.
 */
#ifndef TMS_STATS_H
#define TMS_STATS_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct tms_stats {
    _Atomic uint64_t allocations_total, frees_total;
    _Atomic uint64_t resident_bytes, paused_bytes;
    _Atomic uint64_t pauses_total, resumes_total, failures_total;
    _Atomic uint64_t guarded_bytes, guard_failures_total;
} tms_stats_t;

static inline void tms_stats_add(_Atomic uint64_t *counter, uint64_t amount) {
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
}
static inline void tms_stats_subtract(_Atomic uint64_t *counter, uint64_t amount) {
    atomic_fetch_sub_explicit(counter, amount, memory_order_relaxed);
}
static inline uint64_t tms_stats_read(const _Atomic uint64_t *counter) {
    return atomic_load_explicit(counter, memory_order_relaxed);
}

#endif
