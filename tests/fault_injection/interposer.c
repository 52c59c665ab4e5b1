/* Interposes the calls that the library under test makes to the C library: counts them, and lets chosen calls fail.
 *
 * Loaded with LD_PRELOAD into a worker process. Only calls whose return address lies in a watched object are counted or
 * fail; all other calls, including the simulated GPU's, pass through. It records what the watched objects allocate and map,
 * so that a test can query what they still hold. A close that fails closes the descriptor all the same, as the system's
 * does.
 *
 * This file holds the watched objects, the calls that are to fail, the records, and the functions that a test calls. */
#include "interposer.h"

#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_WATCHED = 8, MAX_TRACE = 1 << 16, LIVE_SLOTS = 1 << 16, MAX_MAPPED = 1 << 12, NAME_BYTES = 32 };

static const char *const names[CALL_COUNT] = {
#define NAME(name) #name,
    CALLS(NAME)
#undef NAME
};

typedef struct rule {
    uint64_t succeed, fail;
    int error;
} rule_t;

/* A block of memory that a watched object holds. */
typedef struct live {
    _Atomic uintptr_t address; /* 0: never used, 1: used once */
} live_t;

/* What a watched object has mapped, and not unmapped since. */
typedef struct mapped {
    uintptr_t begin, end;
    bool anonymous;
} mapped_t;

static struct {
    pthread_mutex_t lock;
    struct {
        uintptr_t begin, end;
    } watched[MAX_WATCHED];
    atomic_int watched_count;
    bool recording;
    size_t trace_count;
    uint8_t trace[MAX_TRACE];
    uint64_t stamps[MAX_TRACE];
    uint64_t (*clock)(const char *);
    rule_t rules[CALL_COUNT];
    uint64_t fired;
    live_t live[LIVE_SLOTS];
    atomic_size_t live_count;
    uint64_t blocks;
    mapped_t mapped[MAX_MAPPED];
    size_t mapped_count;
    int threads;
    pthread_cond_t no_threads;
    atomic_long seconds_ahead;
} it = {.lock = PTHREAD_MUTEX_INITIALIZER, .no_threads = PTHREAD_COND_INITIALIZER};

bool in_watched_object(uintptr_t address) {
    int count = atomic_load_explicit(&it.watched_count, memory_order_acquire);
    for (int i = 0; i < count; i++) {
        if (address >= it.watched[i].begin && address < it.watched[i].end) return true;
    }
    return false;
}

#ifdef __x86_64__
static uint32_t displacement_at(const uint8_t *code) {
    uint32_t displacement;
    memcpy(&displacement, code, sizeof displacement);
    return displacement;
}

/* The address that an instruction refers to relative to its end, `end`. */
static const uint8_t *relative(const uint8_t *end) { return end + (int32_t)displacement_at(end - 4); }

/* The function of another object that was called from `caller`, or NULL for one of the same object. The compiler turns a
 * tail call into a jump, so a function that Python calls for a watched object also has the watched object's return address.
 */
static const void *called_from(const uint8_t *caller) {
    enum { DIRECT = 0xE8, INDIRECT = 0xFF, THROUGH_RIP = 0x15, JUMP_THROUGH_RIP = 0x25, BND = 0xF2 };
    static const uint8_t landing[] = {0xF3, 0x0F, 0x1E, 0xFA}; /* endbr64 */
    const void *const *slot = NULL;
    if (caller[-6] == INDIRECT && caller[-5] == THROUGH_RIP) {
        slot = (const void *const *)(uintptr_t)relative(caller);
    } else if (caller[-5] == DIRECT) {
        const uint8_t *code = relative(caller);
        if (!in_watched_object((uintptr_t)code)) return code;
        if (memcmp(code, landing, sizeof landing) == 0) code += sizeof landing;
        if (*code == BND) code++;
        if (code[0] == INDIRECT && code[1] == JUMP_THROUGH_RIP) slot = (const void *const *)(uintptr_t)relative(code + 6);
    }
    return slot ? *slot : NULL;
}
#else
static const void *called_from(const uint8_t *caller) {
    (void)caller;
    return NULL;
}
#endif

long seconds_ahead(void) { return atomic_load(&it.seconds_ahead); }

bool is_watched(const void *caller, call_t call) {
    if (!in_watched_object((uintptr_t)caller)) return false;
    const void *called = called_from(caller);
    return !called || called == functions[call] || called == checked_functions[call];
}

bool fails(call_t call, const void *caller) {
    if (!is_watched(caller, call)) return false;
    /* The simulated GPU's count of calls puts both records in one order. It has its own lock and never calls back. */
    uint64_t stamp = it.recording && it.clock ? it.clock("*") : 0;
    bool failing = false;
    pthread_mutex_lock(&it.lock);
    if (it.recording && it.trace_count < MAX_TRACE) {
        it.stamps[it.trace_count] = stamp;
        it.trace[it.trace_count++] = (uint8_t)call;
    }
    rule_t *rule = &it.rules[call];
    if (rule->fail && rule->succeed) {
        rule->succeed--;
    } else if (rule->fail) {
        rule->fail--;
        it.fired++;
        failing = true;
    }
    int error = rule->error;
    pthread_mutex_unlock(&it.lock);
    if (failing) errno = error;
    return failing;
}

static size_t slot_of(uintptr_t address) { return (address >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> 48; }

void *keep(call_t call, void *address, const void *caller) {
    if (!address || !is_watched(caller, call)) return address;
    pthread_mutex_lock(&it.lock);
    size_t slot = slot_of((uintptr_t)address);
    while (atomic_load(&it.live[slot].address) > 1) slot = (slot + 1) % LIVE_SLOTS;
    atomic_store(&it.live[slot].address, (uintptr_t)address);
    atomic_fetch_add(&it.live_count, 1);
    it.blocks++;
    pthread_mutex_unlock(&it.lock);
    return address;
}

void forget(void *address) {
    if (!address || !atomic_load_explicit(&it.live_count, memory_order_relaxed)) return;
    size_t slot = slot_of((uintptr_t)address);
    for (uintptr_t found; (found = atomic_load(&it.live[slot].address)) != (uintptr_t)address;
         slot = (slot + 1) % LIVE_SLOTS) {
        if (!found) return;
    }
    pthread_mutex_lock(&it.lock);
    atomic_store(&it.live[slot].address, 1);
    atomic_fetch_sub(&it.live_count, 1);
    it.blocks--;
    pthread_mutex_unlock(&it.lock);
}

/* Under the lock. */
static void add_mapped(uintptr_t begin, uintptr_t end, bool anonymous) {
    if (begin < end && it.mapped_count < MAX_MAPPED) it.mapped[it.mapped_count++] = (mapped_t){begin, end, anonymous};
}

void keep_mapped(uintptr_t begin, uintptr_t end, bool anonymous) {
    pthread_mutex_lock(&it.lock);
    add_mapped(begin, end, anonymous);
    pthread_mutex_unlock(&it.lock);
}

void forget_mapped(uintptr_t begin, uintptr_t end) {
    if (it.mapped_count == 0) return;
    pthread_mutex_lock(&it.lock);
    for (size_t i = 0; i < it.mapped_count;) {
        mapped_t one = it.mapped[i];
        if (one.end <= begin || end <= one.begin) {
            i++;
            continue;
        }
        it.mapped[i] = it.mapped[--it.mapped_count];
        add_mapped(one.begin, begin, one.anonymous);
        add_mapped(end, one.end, one.anonymous);
        i = 0;
    }
    pthread_mutex_unlock(&it.lock);
}

void count_thread(int change) {
    pthread_mutex_lock(&it.lock);
    it.threads += change;
    if (it.threads == 0) pthread_cond_broadcast(&it.no_threads);
    pthread_mutex_unlock(&it.lock);
}

/* ---- control ---- */

static int watch_object(struct dl_phdr_info *info, size_t size, void *wanted) {
    (void)size;
    const char *path = wanted;
    size_t length = strlen(path), found = strlen(info->dlpi_name);
    if (found < length || strcmp(info->dlpi_name + found - length, path) != 0) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        int count = atomic_load(&it.watched_count);
        if (header->p_type != PT_LOAD || !(header->p_flags & PF_X) || count == MAX_WATCHED) continue;
        it.watched[count].begin = info->dlpi_addr + header->p_vaddr;
        it.watched[count].end = it.watched[count].begin + header->p_memsz;
        atomic_store_explicit(&it.watched_count, count + 1, memory_order_release);
    }
    return 0;
}

/* Watches the loaded objects whose path ends with this text; returns the number of watched text segments. */
EXPORT int tms_fault_watch(const char *path) {
    dl_iterate_phdr(watch_object, (void *)(uintptr_t)path);
    return atomic_load(&it.watched_count);
}

EXPORT void tms_fault_clock(uint64_t (*clock)(const char *)) { it.clock = clock; }

EXPORT void tms_fault_record(int on) {
    pthread_mutex_lock(&it.lock);
    it.recording = on != 0;
    if (on) it.trace_count = 0;
    pthread_mutex_unlock(&it.lock);
}

/* The calls since recording began. Each row has one name and the number of driver calls before it. */
EXPORT size_t tms_fault_trace_length(void) { return it.trace_count; }
EXPORT const char *tms_fault_trace_name(size_t row) { return names[it.trace[row]]; }
EXPORT uint64_t tms_fault_trace_stamp(size_t row) { return it.stamps[row]; }

EXPORT int tms_fault_fail_after(const char *name, uint64_t succeed, uint64_t fail, int error) {
    for (int call = 0; call < CALL_COUNT; call++) {
        if (strcmp(names[call], name) != 0) continue;
        pthread_mutex_lock(&it.lock);
        it.rules[call] = (rule_t){.succeed = succeed, .fail = fail, .error = error};
        pthread_mutex_unlock(&it.lock);
        return 0;
    }
    return 1;
}

EXPORT void tms_fault_stop(void) {
    pthread_mutex_lock(&it.lock);
    memset(it.rules, 0, sizeof it.rules);
    pthread_mutex_unlock(&it.lock);
}

EXPORT uint64_t tms_fault_fired(void) { return it.fired; }
EXPORT uint64_t tms_fault_blocks(void) { return it.blocks; }
EXPORT uint64_t tms_fault_mapped_bytes(void) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < it.mapped_count; i++) bytes += it.mapped[i].end - it.mapped[i].begin;
    return bytes;
}
/* The bytes of the resident ones of `pages` pages. */
static uint64_t resident_bytes(uintptr_t begin, size_t pages, size_t page) {
    enum { MAX_PAGES = 1 << 12 };
    unsigned char resident[MAX_PAGES];
    /* mincore fails if one of the pages is not mapped. */
    if (pages > MAX_PAGES || mincore((void *)begin, pages * page, resident) != 0) {
        if (pages <= 1) return 0;
        size_t half = pages / 2;
        return resident_bytes(begin, half, page) + resident_bytes(begin + half * page, pages - half, page);
    }
    uint64_t bytes = 0;
    for (size_t i = 0; i < pages; i++) bytes += resident[i] & 1 ? page : 0;
    return bytes;
}

/* The part of it that is resident, without mapped files: the system evicts their pages when it lacks memory. */
EXPORT uint64_t tms_fault_resident_bytes(void) {
    uint64_t bytes = 0;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < it.mapped_count; i++) {
        mapped_t one = it.mapped[i];
        if (one.anonymous) bytes += resident_bytes(one.begin, (one.end - one.begin + page - 1) / page, page);
    }
    return bytes;
}

/* Waits until the watched objects have no thread, but no longer than `seconds`. Returns how many there are. The clock of the
 * watched objects goes forward by a second. */
EXPORT int tms_fault_wait_for_threads(int seconds) {
    struct timespec until;
    atomic_fetch_add(&it.seconds_ahead, 1);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    pthread_mutex_lock(&it.lock);
    while (it.threads > 0 && pthread_cond_timedwait(&it.no_threads, &it.lock, &until) == 0) continue;
    int threads = it.threads;
    pthread_mutex_unlock(&it.lock);
    return threads;
}
