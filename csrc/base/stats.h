/* Counters. Each is updated with relaxed atomics when the counted event happens, and may be read at any time on any thread.
 * Derived numbers (damaged, quarantined, deferred) are computed by tms_inspect_counters.
 *
 * A gauge has one writer at a time, which its owner ensures by a lock.
 */
#ifndef TMS_STATS_H
#define TMS_STATS_H

#include <stdatomic.h>
#include <stdint.h>

/* The counters of all pauses, or of all resumes. Time and bytes count only calls that succeeded. */
typedef struct tms_calls {
    _Atomic uint64_t successes, failures;
    _Atomic uint64_t nanoseconds;
    _Atomic uint64_t bytes;           /* bytes of device memory that were released or mapped */
    _Atomic uint64_t copied_bytes;    /* bytes copied to or from backups */
    _Atomic uint64_t unchanged_bytes; /* pauses: bytes that retained backups had already */
} tms_calls_t;

typedef struct tms_stats {
    _Atomic uint64_t allocations_total, frees_total, failed_allocations;
    tms_calls_t pauses, resumes;
    _Atomic uint64_t guarded_bytes, guard_failures_total;
} tms_stats_t;

/* A number of bytes, and its peak. */
typedef struct tms_gauge {
    _Atomic uint64_t now, peak;
} tms_gauge_t;

static inline void tms_stats_add(_Atomic uint64_t *counter, uint64_t amount) {
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
}
static inline uint64_t tms_stats_read(const _Atomic uint64_t *counter) {
    return atomic_load_explicit(counter, memory_order_relaxed);
}

/* `change`: a difference, modulo 2^64. */
static inline void tms_gauge_change(tms_gauge_t *gauge, uint64_t change) {
    uint64_t now = tms_stats_read(&gauge->now) + change;
    atomic_store_explicit(&gauge->now, now, memory_order_relaxed);
    if (now > tms_stats_read(&gauge->peak)) atomic_store_explicit(&gauge->peak, now, memory_order_relaxed);
}
static inline void tms_gauge_reset_peak(tms_gauge_t *gauge) {
    atomic_store_explicit(&gauge->peak, tms_stats_read(&gauge->now), memory_order_relaxed);
}

#endif
