#include "base/shared_page.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/identity.h"

enum {
    UUID_BYTES = TMS_SHARED_PAGE_UUID_WORDS * sizeof(uint64_t),
    DIGIT_BITS = 4,
    DECIMAL_DIGITS = 10,
    LOWER_CASE = 0x20,
    OTHERS = 0 /* the number of the row `others` */
};

void tms_shared_page_copy_text(uint64_t words[TMS_SHARED_PAGE_TEXT_WORDS], const char *text) {
    size_t bytes = TMS_SHARED_PAGE_TEXT_WORDS * sizeof(uint64_t), length = strlen(text);
    memset(words, 0, bytes);
    memcpy(words, text, length < bytes ? length : bytes);
}

static tms_shared_page_row_t *row_at(tms_shared_page_t *page, tms_shared_row_t row) {
    page->dirty[row] = true;
    return row == OTHERS ? &page->image->others : &page->image->rows[row - 1];
}

/* ---- making it ---- */

tms_status_t tms_shared_page_init(tms_shared_page_t *page, bool wanted, const char *directory, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    page->directory = directory;
    page->file.fd = -1;
    atomic_init(&page->state, wanted ? TMS_SHARED_PAGE_NOT_OPENED : TMS_SHARED_PAGE_OFF);
    int os_error = pthread_mutex_init(&page->opening, NULL);
    return os_error == 0 ? TMS_OK : tms_error_set_os(error, &context, "pthread_mutex_init", ENOMEM, NULL);
}

void tms_shared_page_release(tms_shared_page_t *page) {
    tms_shared_page_file_unlink(&page->file);
    tms_shared_page_file_close(&page->file);
    free(page->image);
    pthread_mutex_destroy(&page->opening);
}

static unsigned hexadecimal(char digit) {
    return digit >= '0' && digit <= '9' ? (unsigned)(digit - '0') : (unsigned)((digit | LOWER_CASE) - 'a' + DECIMAL_DIGITS);
}

/* Parses the 16 bytes of a UUID's text. */
static void parse_uuid(const char *text, size_t length, uint64_t words[TMS_SHARED_PAGE_UUID_WORDS]) {
    unsigned char bytes[UUID_BYTES] = {0};
    size_t digits = 0;
    for (size_t i = 0; i < length && digits < sizeof(bytes) * 2; i++) {
        if (text[i] == '-') continue;
        bytes[digits / 2] = (unsigned char)(bytes[digits / 2] << DIGIT_BITS | hexadecimal(text[i]));
        digits++;
    }
    memcpy(words, bytes, sizeof(bytes));
}

static void apply_role(tms_shared_page_t *page) {
    tms_shared_page_process_t *process = &page->image->process;
    memcpy(process->name, page->role.name, sizeof(process->name));
    if (process->name[0] == 0) tms_shared_page_copy_text(process->name, program_invocation_short_name);
    process->rank_known = page->role.rank_known;
    process->rank = page->role.rank;
    process->serves = page->role.serves;
}

static void describe_process(tms_shared_page_t *page) {
    tms_shared_page_process_t *process = &page->image->process;
    char boot_id[TMS_BOOT_ID_BYTES];
    dev_t device;
    ino_t inode;
    process->pid = (uint64_t)getpid();
    process->process_started = tms_identity_started();
    process->made = tms_clock_nanoseconds();
    if (tms_identity_namespace(&device, &inode)) process->pid_namespace = inode;
    if (tms_identity_boot_id(boot_id)) parse_uuid(boot_id, sizeof(boot_id), process->boot_id);
    apply_role(page);
}

/* Copies words of the image to the page. */
static void publish_words(tms_shared_page_t *page, size_t begin, size_t end) {
    const uint64_t *image = (const uint64_t *)page->image;
    tms_shared_word_t *words = page->file.words;
    for (size_t word = begin; word < end; word++) atomic_store_explicit(&words[word], image[word], memory_order_release);
}

static bool make(tms_shared_page_t *page, const tms_shared_page_description_t *description,
                 tms_directory_failure_t *failure) {
    if (!page->image) page->image = calloc(1, sizeof(*page->image));
    if (!page->image) {
        *failure = (tms_directory_failure_t){.call = "calloc", .os_error = ENOMEM};
        page->file.path[0] = '\0';
        return false;
    }
    if (!tms_shared_page_file_create(&page->file, page->directory, failure)) return false;
    describe_process(page);
    page->image->process.device_count = (uint64_t)description->device_count;
    memcpy(page->image->devices, description->devices, sizeof(page->image->devices));
    page->image->format = TMS_SHARED_PAGE_FORMAT;
    publish_words(page, TMS_SHARED_WORD(process), TMS_SHARED_WORD(others));
    publish_words(page, TMS_SHARED_WORD(format), TMS_SHARED_WORD(sequence));
    atomic_store_explicit(&page->file.words[TMS_SHARED_WORD(magic)], TMS_SHARED_PAGE_MAGIC, memory_order_release);
    return true;
}

bool tms_shared_page_open(tms_shared_page_t *page, const tms_shared_page_description_t *description,
                          tms_directory_failure_t *failure) {
    bool failed = false;
    pthread_mutex_lock(&page->opening);
    if (tms_shared_page_may_open(page)) {
        failed = !make(page, description, failure);
        atomic_store_explicit(&page->state, failed ? TMS_SHARED_PAGE_OFF : TMS_SHARED_PAGE_OPEN, memory_order_release);
    }
    pthread_mutex_unlock(&page->opening);
    return !failed;
}

void tms_shared_page_at_exit(tms_shared_page_t *page) {
    pthread_mutex_lock(&page->opening);
    if (tms_shared_page_may_open(page)) atomic_store(&page->state, TMS_SHARED_PAGE_OFF);
    tms_shared_page_file_unlink(&page->file);
    pthread_mutex_unlock(&page->opening);
}

void tms_shared_page_after_fork_in_child(tms_shared_page_t *page) {
    const bool was_open = tms_shared_page_is_open(page);
    (void)pthread_mutex_init(&page->opening, NULL); /* cannot fail: it succeeded on this memory before */
    tms_shared_page_file_close(&page->file);
    if (!was_open) return;
    memset(page->image, 0, sizeof(*page->image));
    memset(page->owners, 0, sizeof(page->owners));
    memset(page->dirty, 0, sizeof(page->dirty));
    atomic_store(&page->state, TMS_SHARED_PAGE_NOT_OPENED);
}

/* ---- rows ---- */

/* Frees a row for another tag and device: adds its totals to `others`. */
static void give_away(tms_shared_page_t *page, tms_shared_row_t row) {
    tms_shared_page_row_t *from = row_at(page, row), *to = row_at(page, OTHERS);
    to->pauses_total += from->pauses_total;
    to->resumes_total += from->resumes_total;
    to->failed_pauses_total += from->failed_pauses_total;
    to->failed_resumes_total += from->failed_resumes_total;
    to->failed_allocations_total += from->failed_allocations_total;
    memset(from, 0, sizeof(*from));
}

static tms_shared_row_t give(tms_shared_page_t *page, tms_shared_row_t row, const tms_tag_t *tag, int device) {
    tms_shared_page_row_t *given = row_at(page, row);
    page->owners[row].tag = tag;
    page->owners[row].call = 0;
    tms_shared_page_copy_text(given->tag, tag->name);
    given->device = (uint64_t)device;
    return row;
}

tms_shared_row_t tms_shared_page_row(tms_shared_page_t *page, const tms_tag_t *tag, int device) {
    if (!tms_shared_page_is_open(page)) return OTHERS;
    const uint64_t count = page->image->process.row_count;
    tms_shared_row_t unused = OTHERS;
    for (tms_shared_row_t row = 1; row <= count; row++) {
        if (page->owners[row].tag == tag && page->image->rows[row - 1].device == (uint64_t)device) return row;
        bool holds = page->owners[row].allocations > 0 || page->image->rows[row - 1].slack_bytes > 0;
        if (unused == OTHERS && !holds) unused = row;
    }
    if (count < TMS_SHARED_PAGE_ROWS) {
        page->image->process.row_count++;
        return give(page, (tms_shared_row_t)(count + 1), tag, device);
    }
    if (unused == OTHERS) return OTHERS;
    give_away(page, unused);
    return give(page, unused, tag, device);
}

void tms_shared_page_add_allocation(tms_shared_page_t *page, tms_shared_row_t row) {
    if (!tms_shared_page_is_open(page)) return;
    page->owners[row].allocations++;
    row_at(page, row)->allocations++;
    page->image->process.allocations_total++;
}

void tms_shared_page_remove_allocation(tms_shared_page_t *page, tms_shared_row_t row) {
    if (!tms_shared_page_is_open(page)) return;
    page->owners[row].allocations--;
    row_at(page, row)->allocations--;
    page->image->process.frees_total++;
}

void tms_shared_page_fail_allocation(tms_shared_page_t *page, tms_shared_row_t row) {
    if (!tms_shared_page_is_open(page)) return;
    row_at(page, row)->failed_allocations_total++;
    page->image->process.failed_allocations_total++;
}

void tms_shared_page_change(tms_shared_page_t *page, tms_shared_row_t row, const tms_shared_page_change_t *change) {
    if (!tms_shared_page_is_open(page)) return;
    tms_shared_page_row_t *changed = row_at(page, row);
    changed->resident_bytes += change->resident_bytes;
    changed->paused_bytes += change->paused_bytes;
    changed->slack_bytes += change->slack_bytes;
    changed->host_backup_bytes += change->host_backup_bytes;
    changed->disk_backup_bytes += change->disk_backup_bytes;
    changed->shared_backup_bytes += change->shared_backup_bytes;
    changed->damaged += change->damaged;
}

/* ---- calls ---- */

/* A macro, because rows and the process have the same counters of calls. */
#define COUNT_CALL(numbers, outcome)                                                                                        \
    do {                                                                                                                    \
        const bool pauses = (outcome)->call == TMS_SHARED_PAGE_PAUSE;                                                       \
        if (!(outcome)->succeeded) {                                                                                        \
            (numbers)->failed_pauses_total += pauses;                                                                       \
            (numbers)->failed_resumes_total += !pauses;                                                                     \
        } else if (pauses) {                                                                                                \
            (numbers)->pauses_total++;                                                                                      \
            (numbers)->last_pause_ended = (outcome)->ended;                                                                 \
            (numbers)->last_pause_nanoseconds = (outcome)->nanoseconds;                                                     \
        } else {                                                                                                            \
            (numbers)->resumes_total++;                                                                                     \
            (numbers)->last_resume_ended = (outcome)->ended;                                                                \
            (numbers)->last_resume_nanoseconds = (outcome)->nanoseconds;                                                    \
        }                                                                                                                   \
    } while (0)

void tms_shared_page_begin_moves(tms_shared_page_t *page, tms_shared_page_call_t call, uint64_t now) {
    if (!tms_shared_page_is_open(page)) return;
    page->calls++;
    page->image->process.running = (uint64_t)call;
    page->image->process.running_since = call == TMS_SHARED_PAGE_IDLE ? 0 : now;
}

void tms_shared_page_count(tms_shared_page_t *page, tms_shared_row_t row, const tms_shared_page_outcome_t *outcome) {
    if (!tms_shared_page_is_open(page) || outcome->call == TMS_SHARED_PAGE_IDLE) return;
    if (page->owners[row].call == page->calls) return;
    page->owners[row].call = page->calls;
    tms_shared_page_row_t *numbers = row_at(page, row);
    COUNT_CALL(numbers, outcome);
}

void tms_shared_page_end_moves(tms_shared_page_t *page) {
    if (!tms_shared_page_is_open(page)) return;
    page->image->process.running = TMS_SHARED_PAGE_IDLE;
    page->image->process.running_since = 0;
}

void tms_shared_page_count_call(tms_shared_page_t *page, const tms_shared_page_outcome_t *outcome) {
    if (!tms_shared_page_is_open(page) || outcome->call == TMS_SHARED_PAGE_IDLE) return;
    COUNT_CALL(&page->image->process, outcome);
}

/* ---- the page ---- */

static void publish_rows(tms_shared_page_t *page) {
    const size_t words = sizeof(tms_shared_page_row_t) / sizeof(uint64_t);
    const uint64_t count = page->image->process.row_count;
    for (size_t row = 0; row <= count; row++) {
        if (!page->dirty[row]) continue;
        page->dirty[row] = false;
        const size_t first = row == OTHERS ? TMS_SHARED_WORD(others) : TMS_SHARED_WORD(rows) + (row - 1) * words;
        publish_words(page, first, first + words);
    }
}

/* Copies the words of the process from `first` on, and the dirty rows, under the sequence. */
static void publish_from(tms_shared_page_t *page, size_t first) {
    tms_shared_word_t *sequence = &page->file.words[TMS_SHARED_WORD(sequence)];
    const uint64_t number = atomic_load_explicit(sequence, memory_order_relaxed);
    atomic_store_explicit(sequence, number + 1, memory_order_relaxed);
    publish_words(page, first, TMS_SHARED_WORD(devices));
    publish_rows(page);
    atomic_store_explicit(sequence, number + 2, memory_order_release);
}

void tms_shared_page_publish(tms_shared_page_t *page) {
    if (tms_shared_page_is_open(page)) publish_from(page, TMS_SHARED_WORD(process.row_count));
}

void tms_shared_page_set_role(tms_shared_page_t *page, const tms_shared_page_role_t *role) {
    pthread_mutex_lock(&page->opening);
    page->role = *role;
    if (tms_shared_page_is_open(page)) {
        apply_role(page);
        publish_from(page, TMS_SHARED_WORD(process));
    }
    pthread_mutex_unlock(&page->opening);
}

/* ---- requests ---- */

void tms_shared_page_serve(tms_shared_page_t *page, unsigned kind, bool served, int os_error) {
    if (!tms_shared_page_is_open(page) || kind >= TMS_SHARED_PAGE_KINDS) return;
    tms_shared_word_t *words = page->file.words;
    if (!served) atomic_store(&words[TMS_SHARED_WORD(serve_error) + kind], (uint64_t)os_error);
    /* The count changes first: a requester that sees the new count is done. A requester that comes in between finds its
     * request gone without a new count, and repeats it. */
    atomic_fetch_add(&words[(served ? TMS_SHARED_WORD(served_total) : TMS_SHARED_WORD(unserved_total)) + kind], 1);
    atomic_store(&words[TMS_SHARED_WORD(requests) + kind], 0);
}
