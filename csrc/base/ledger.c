#include "base/ledger.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

enum { FIRST_RECORDS = 256, FIRST_HOLDERS = 16 };

typedef enum record_kind {
    KIND_NONE, /* a record in the list of free records */
    KIND_ALLOCATION,
    KIND_HANDLE, /* physical memory */
    KIND_MAPPING /* a mapping of physical memory */
} record_kind_t;

struct tms_ledger_record {
    uint64_t key;      /* address or handle; unique among the keyed records of its kind */
    uint64_t bytes;    /* size; for a mapping, the size of its range */
    uint32_t holder;   /* the holder; unused for a mapping */
    uint32_t memory;   /* for a mapping: the record of the memory that is mapped */
    uint32_t releases; /* for a handle: number of releases needed; a record with 0 is not in the slots */
    uint32_t taken;    /* for a handle: number of releases that are not settled */
    uint32_t mappings; /* for a handle: number of mappings */
    uint32_t next;     /* in the list of free or of taken records */
    record_kind_t kind;
};

struct tms_ledger_holder {
    int32_t caller, device;
    uint64_t bytes, allocations;
};

void tms_ledger_init(tms_ledger_t *ledger) {
    *ledger = (tms_ledger_t){.free_records = TMS_NO_RECORD};
    pthread_mutex_init(&ledger->lock, NULL);
    tms_callers_init(&ledger->callers);
}

void tms_ledger_release(tms_ledger_t *ledger) {
    pthread_mutex_destroy(&ledger->lock);
    tms_callers_release(&ledger->callers);
    free(ledger->records);
    free(ledger->slots);
    free(ledger->holders);
    *ledger = (tms_ledger_t){.free_records = TMS_NO_RECORD};
}

void tms_ledger_before_fork(tms_ledger_t *ledger) { pthread_mutex_lock(&ledger->lock); }

void tms_ledger_after_fork_in_parent(tms_ledger_t *ledger) { pthread_mutex_unlock(&ledger->lock); }

void tms_ledger_after_fork_in_child(tms_ledger_t *ledger) {
    pthread_mutex_init(&ledger->lock, NULL);
    for (size_t i = 0; i < ledger->slot_count; i++) ledger->slots[i] = TMS_NO_RECORD;
    ledger->record_count = ledger->keyed = ledger->holder_count = 0;
    ledger->free_records = TMS_NO_RECORD;
    ledger->uncounted = 0;
}

/* ---- the table; every function below is called under the lock ---- */

static size_t home_of(const tms_ledger_t *ledger, record_kind_t kind, uint64_t key) {
    return (size_t)(tms_hash_mix(key + (uint64_t)kind) & (ledger->slot_count - 1));
}

/* Returns the slot of a record, or the free slot where it would be. The table must have slots. */
static size_t slot_of(const tms_ledger_t *ledger, record_kind_t kind, uint64_t key) {
    size_t slot = home_of(ledger, kind, key);
    for (; ledger->slots[slot] != TMS_NO_RECORD; slot = (slot + 1) & (ledger->slot_count - 1)) {
        const tms_ledger_record_t *record = &ledger->records[ledger->slots[slot]];
        if (record->key == key && record->kind == kind) break;
    }
    return slot;
}

static uint32_t find(const tms_ledger_t *ledger, record_kind_t kind, uint64_t key) {
    return ledger->slot_count ? ledger->slots[slot_of(ledger, kind, key)] : TMS_NO_RECORD;
}

/* Puts a record into the slots. There is room, because the record is counted in `keyed`. */
static void place(tms_ledger_t *ledger, uint32_t number) {
    const tms_ledger_record_t *record = &ledger->records[number];
    ledger->slots[slot_of(ledger, record->kind, record->key)] = number;
}

/* Takes a record out of the slots. Records after it move up, so that searches need no tombstones. */
static void displace(tms_ledger_t *ledger, uint32_t number) {
    const size_t mask = ledger->slot_count - 1;
    size_t hole = slot_of(ledger, ledger->records[number].kind, ledger->records[number].key);
    for (size_t slot = (hole + 1) & mask; ledger->slots[slot] != TMS_NO_RECORD; slot = (slot + 1) & mask) {
        const tms_ledger_record_t *record = &ledger->records[ledger->slots[slot]];
        size_t home = home_of(ledger, record->kind, record->key);
        if (((slot - home) & mask) < ((slot - hole) & mask)) continue;
        ledger->slots[hole] = ledger->slots[slot];
        hole = slot;
    }
    ledger->slots[hole] = TMS_NO_RECORD;
}

/* Makes room for one more record in the array and in the slots. */
static bool make_room(tms_ledger_t *ledger) {
    if (ledger->free_records == TMS_NO_RECORD && ledger->record_count == ledger->record_capacity) {
        size_t capacity = ledger->record_capacity ? ledger->record_capacity * 2 : FIRST_RECORDS;
        tms_ledger_record_t *grown = capacity < TMS_NO_RECORD ? realloc(ledger->records, capacity * sizeof(*grown)) : NULL;
        if (!grown) return false;
        ledger->records = grown;
        ledger->record_capacity = capacity;
    }
    if ((ledger->keyed + 1) * 2 <= ledger->slot_count) return true;
    size_t count = ledger->slot_count ? ledger->slot_count * 2 : (size_t)FIRST_RECORDS * 2;
    uint32_t *before = ledger->slots, *grown = malloc(count * sizeof(*grown));
    size_t count_before = ledger->slot_count;
    if (!grown) return false;
    for (size_t i = 0; i < count; i++) grown[i] = TMS_NO_RECORD;
    ledger->slots = grown;
    ledger->slot_count = count;
    for (size_t i = 0; i < count_before; i++) {
        if (before[i] != TMS_NO_RECORD) place(ledger, before[i]);
    }
    free(before);
    return true;
}

/* Adds a new record to the slots. The caller has called make_room. */
static uint32_t insert(tms_ledger_t *ledger, tms_ledger_record_t record) {
    uint32_t number = ledger->free_records;
    if (number == TMS_NO_RECORD)
        number = (uint32_t)ledger->record_count++;
    else
        ledger->free_records = ledger->records[number].next;
    ledger->records[number] = record;
    place(ledger, number);
    ledger->keyed++;
    return number;
}

static void recycle(tms_ledger_t *ledger, uint32_t number) {
    ledger->records[number] = (tms_ledger_record_t){.kind = KIND_NONE, .next = ledger->free_records};
    ledger->free_records = number;
}

/* ---- holders ---- */

static uint32_t find_holder(tms_ledger_t *ledger, int32_t caller, int32_t device) {
    for (size_t i = 0; i < ledger->holder_count; i++) {
        if (ledger->holders[i].caller == caller && ledger->holders[i].device == device) return (uint32_t)i;
    }
    if (ledger->holder_count == ledger->holder_capacity) {
        size_t capacity = ledger->holder_capacity ? ledger->holder_capacity * 2 : FIRST_HOLDERS;
        tms_ledger_holder_t *grown = realloc(ledger->holders, capacity * sizeof(*grown));
        if (!grown) return TMS_NO_RECORD;
        ledger->holders = grown;
        ledger->holder_capacity = capacity;
    }
    ledger->holders[ledger->holder_count] = (tms_ledger_holder_t){.caller = caller, .device = device};
    return (uint32_t)ledger->holder_count++;
}

/* Stops counting the memory of a record, which has gone back to the driver. */
static void discount(tms_ledger_t *ledger, uint32_t number) {
    tms_ledger_record_t *record = &ledger->records[number];
    ledger->holders[record->holder].bytes -= record->bytes;
    ledger->holders[record->holder].allocations--;
    recycle(ledger, number);
}

static void discount_if_gone(tms_ledger_t *ledger, uint32_t memory) {
    const tms_ledger_record_t *record = &ledger->records[memory];
    if (record->releases == 0 && record->taken == 0 && record->mappings == 0) discount(ledger, memory);
}

/* ---- taking out and settling ---- */

static void take_out(tms_ledger_t *ledger, uint32_t number, tms_ledger_taken_t *taken) {
    displace(ledger, number);
    ledger->records[number].next = taken->first;
    taken->first = number;
}

/* Ends a record that was taken out. */
static void drop(tms_ledger_t *ledger, uint32_t number) {
    tms_ledger_record_t *record = &ledger->records[number];
    ledger->keyed--;
    if (record->kind == KIND_ALLOCATION) {
        discount(ledger, number);
        return;
    }
    uint32_t memory = record->memory;
    ledger->records[memory].mappings--;
    recycle(ledger, number);
    discount_if_gone(ledger, memory);
}

/* Removes a record whose end was not seen, because a new record has its key. */
static void forget(tms_ledger_t *ledger, record_kind_t kind, uint64_t key) {
    uint32_t number = find(ledger, kind, key);
    if (number == TMS_NO_RECORD) return;
    displace(ledger, number);
    if (kind != KIND_HANDLE) {
        drop(ledger, number);
        return;
    }
    ledger->keyed--;
    ledger->records[number].releases = 0;
    discount_if_gone(ledger, number);
}

static void put_back(tms_ledger_t *ledger, uint32_t number) {
    tms_ledger_record_t *record = &ledger->records[number];
    /* If another thread has got the same address by now, the failed call has freed it after all. */
    if (find(ledger, record->kind, record->key) != TMS_NO_RECORD)
        drop(ledger, number);
    else
        place(ledger, number);
}

/* Settles a release of a handle. A failed release is forgotten if another record has the handle by now, or if memory is
 * short. */
static void settle_handle(tms_ledger_t *ledger, uint32_t number, bool gone) {
    const uint64_t handle = ledger->records[number].key;
    ledger->records[number].taken--;
    if (!gone) {
        uint32_t keyed = find(ledger, KIND_HANDLE, handle);
        if (keyed == TMS_NO_RECORD && make_room(ledger)) {
            place(ledger, number);
            ledger->keyed++;
            keyed = number;
        }
        if (keyed == number) ledger->records[number].releases++;
    }
    discount_if_gone(ledger, number);
}

void tms_ledger_settle(tms_ledger_t *ledger, tms_ledger_taken_t taken, bool gone) {
    if (taken.first == TMS_NO_RECORD) return;
    pthread_mutex_lock(&ledger->lock);
    if (ledger->records[taken.first].kind == KIND_HANDLE) {
        settle_handle(ledger, taken.first, gone);
    } else {
        for (uint32_t number = taken.first, next; number != TMS_NO_RECORD; number = next) {
            next = ledger->records[number].next;
            if (gone)
                drop(ledger, number);
            else
                put_back(ledger, number);
        }
    }
    pthread_mutex_unlock(&ledger->lock);
}

tms_ledger_taken_t tms_ledger_take(tms_ledger_t *ledger, uint64_t address) {
    tms_ledger_taken_t taken = {TMS_NO_RECORD};
    pthread_mutex_lock(&ledger->lock);
    uint32_t number = find(ledger, KIND_ALLOCATION, address);
    if (number != TMS_NO_RECORD) take_out(ledger, number, &taken);
    pthread_mutex_unlock(&ledger->lock);
    return taken;
}

tms_ledger_taken_t tms_ledger_take_handle(tms_ledger_t *ledger, uint64_t handle) {
    tms_ledger_taken_t taken = {TMS_NO_RECORD};
    pthread_mutex_lock(&ledger->lock);
    uint32_t number = find(ledger, KIND_HANDLE, handle);
    if (number != TMS_NO_RECORD) {
        tms_ledger_record_t *record = &ledger->records[number];
        record->taken++;
        if (--record->releases == 0) {
            displace(ledger, number);
            ledger->keyed--;
        }
        taken.first = number;
    }
    pthread_mutex_unlock(&ledger->lock);
    return taken;
}

/* Takes out the mappings that begin in a range, a part of which is mapped to memory that is not known. */
static void take_scattered(tms_ledger_t *ledger, uint64_t begin, uint64_t end, tms_ledger_taken_t *taken) {
    for (uint32_t number = 0; number < ledger->record_count; number++) {
        const tms_ledger_record_t *record = &ledger->records[number];
        if (record->kind == KIND_MAPPING && record->key >= begin && record->key < end &&
            find(ledger, KIND_MAPPING, record->key) == number)
            take_out(ledger, number, taken);
    }
}

tms_ledger_taken_t tms_ledger_take_mappings(tms_ledger_t *ledger, uint64_t address, uint64_t bytes) {
    tms_ledger_taken_t taken = {TMS_NO_RECORD};
    const uint64_t end = address + bytes;
    pthread_mutex_lock(&ledger->lock);
    while (address < end) {
        uint32_t number = find(ledger, KIND_MAPPING, address);
        if (number == TMS_NO_RECORD) {
            take_scattered(ledger, address, end, &taken);
            break;
        }
        take_out(ledger, number, &taken);
        address += ledger->records[number].bytes;
    }
    pthread_mutex_unlock(&ledger->lock);
    return taken;
}

/* ---- additions ---- */

/* Takes the lock in any case. Returns the holder for the caller and the device, or TMS_NO_RECORD if memory is short. */
static uint32_t lock_and_find_holder(tms_ledger_t *ledger, const void *caller, int device) {
    const uintptr_t address = (uintptr_t)caller;
    const uint64_t unloads = tms_callers_unloads();
    pthread_mutex_lock(&ledger->lock);
    int32_t known = tms_callers_cached(&ledger->callers, address, unloads);
    if (known == TMS_NO_CALLER) {
        tms_caller_object_t object;
        pthread_mutex_unlock(&ledger->lock);
        tms_caller_find(address, &object);
        pthread_mutex_lock(&ledger->lock);
        known = tms_callers_remember(&ledger->callers, &object);
    }
    return known == TMS_NO_CALLER ? TMS_NO_RECORD : find_holder(ledger, known, device);
}

static void add(tms_ledger_t *ledger, const void *caller, int device, tms_ledger_record_t record) {
    record.holder = lock_and_find_holder(ledger, caller, device);
    forget(ledger, record.kind, record.key);
    if (record.holder != TMS_NO_RECORD && make_room(ledger)) {
        insert(ledger, record);
        ledger->holders[record.holder].bytes += record.bytes;
        ledger->holders[record.holder].allocations++;
    } else {
        ledger->uncounted++;
    }
    pthread_mutex_unlock(&ledger->lock);
}

void tms_ledger_add(tms_ledger_t *ledger, const void *caller, int device, uint64_t address, uint64_t bytes) {
    add(ledger, caller, device, (tms_ledger_record_t){.key = address, .bytes = bytes, .kind = KIND_ALLOCATION});
}

void tms_ledger_add_handle(tms_ledger_t *ledger, const void *caller, int device, uint64_t handle, uint64_t bytes) {
    add(ledger, caller, device, (tms_ledger_record_t){.key = handle, .bytes = bytes, .kind = KIND_HANDLE, .releases = 1});
}

void tms_ledger_retain_handle(tms_ledger_t *ledger, uint64_t handle) {
    pthread_mutex_lock(&ledger->lock);
    uint32_t number = find(ledger, KIND_HANDLE, handle);
    if (number != TMS_NO_RECORD) ledger->records[number].releases++;
    pthread_mutex_unlock(&ledger->lock);
}

/* If a mapping cannot be recorded, its memory counts only until it is released. */
void tms_ledger_map(tms_ledger_t *ledger, uint64_t address, uint64_t bytes, uint64_t handle) {
    pthread_mutex_lock(&ledger->lock);
    forget(ledger, KIND_MAPPING, address);
    uint32_t memory = find(ledger, KIND_HANDLE, handle);
    if (memory != TMS_NO_RECORD && make_room(ledger)) {
        insert(ledger, (tms_ledger_record_t){.key = address, .bytes = bytes, .memory = memory, .kind = KIND_MAPPING});
        ledger->records[memory].mappings++;
    }
    pthread_mutex_unlock(&ledger->lock);
}

void tms_ledger_clear_device(tms_ledger_t *ledger, int device) {
    pthread_mutex_lock(&ledger->lock);
    for (uint32_t number = 0; number < ledger->record_count; number++) {
        const tms_ledger_record_t *record = &ledger->records[number];
        if (record->kind != KIND_ALLOCATION || ledger->holders[record->holder].device != device ||
            find(ledger, KIND_ALLOCATION, record->key) != number)
            continue;
        displace(ledger, number);
        drop(ledger, number);
    }
    pthread_mutex_unlock(&ledger->lock);
}

/* ---- for callers ---- */

size_t tms_ledger_rows(tms_ledger_t *ledger, tms_library_info_t *rows, size_t capacity) {
    size_t count = 0;
    pthread_mutex_lock(&ledger->lock);
    for (size_t i = 0; i < ledger->holder_count; i++) {
        const tms_ledger_holder_t *holder = &ledger->holders[i];
        if (holder->allocations == 0) continue;
        if (count < capacity)
            rows[count] = (tms_library_info_t){.path = tms_callers_path(&ledger->callers, holder->caller),
                                               .device = holder->device,
                                               .bytes = holder->bytes,
                                               .allocations = holder->allocations};
        count++;
    }
    pthread_mutex_unlock(&ledger->lock);
    return count;
}

uint64_t tms_ledger_uncounted(tms_ledger_t *ledger) {
    pthread_mutex_lock(&ledger->lock);
    uint64_t uncounted = ledger->uncounted;
    pthread_mutex_unlock(&ledger->lock);
    return uncounted;
}
