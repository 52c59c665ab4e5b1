/* Guards what readers see of shared_page.c during writes: all of a write or none, on another thread and in another process.
 */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "support/shared_page_fixture.h"

#include "own_process.h"

enum { ROWS = 8, MAX_WRITES = 2000000, LEAST_READS = 500, LEAST_CHANGES = 250, LONGEST_GAP = 8192 };

/* In memory that processes share. */
typedef struct meeting {
    _Atomic bool read_enough, written_all;
} meeting_t;
static meeting_t *meeting;

/* Every row always has the same numbers: a copy in which two differ was taken in the middle of a write. Returns whether
 * there was none. Stops the writer in any case. */
static bool read_whole_pages(void) {
    bool whole = true;
    int fd = open(page.file.path, O_RDONLY);
    uint64_t last = 0;
    /* Until it has met the writer often enough. */
    for (unsigned reads = 0, changes = 0;
         whole && (reads < LEAST_READS || (changes < LEAST_CHANGES && !atomic_load(&meeting->written_all)));) {
        tms_shared_page_contents_t copy;
        if (tms_shared_page_file_read(fd, &copy) != TMS_SHARED_PAGE_READ) continue;
        reads++;
        const uint64_t expected = copy.process.pauses_total;
        changes += expected != last;
        last = expected;
        for (int row = 0; row < ROWS; row++) {
            whole = whole && copy.rows[row].resident_bytes == expected && copy.rows[row].paused_bytes == 0 - expected;
        }
    }
    atomic_store(&meeting->read_enough, true);
    close(fd);
    return whole;
}

/* Writes with gaps of different lengths, in some of which a reader can copy the page. */
static void *write_on(void *unused) {
    (void)unused;
    for (uint64_t i = 1; i <= MAX_WRITES && !atomic_load(&meeting->read_enough); i++) {
        for (tms_shared_row_t row = 1; row <= ROWS; row++)
            tms_shared_page_change(&page, row, &(tms_shared_page_change_t){.resident_bytes = 1, .paused_bytes = UINT64_MAX});
        tms_shared_page_count_call(
            &page, &(tms_shared_page_outcome_t){.call = TMS_SHARED_PAGE_PAUSE, .succeeded = true, .ended = i});
        tms_shared_page_publish(&page);
        for (volatile uint64_t gap = i * 2654435761u % LONGEST_GAP; gap > 0; gap--) continue;
    }
    atomic_store(&meeting->written_all, true);
    return NULL;
}

/* The end of the page cannot be written, so that a write stops in its middle, where this handler looks at the page. */
static tms_shared_page_reading_t in_the_middle;

static void look_in_the_middle(int number) {
    tms_shared_page_contents_t copy;
    (void)number;
    int fd = open(page.file.path, O_RDONLY);
    in_the_middle = tms_shared_page_file_read(fd, &copy);
    close(fd);
    mprotect((void *)page.file.words, TMS_SHARED_PAGE_BYTES, PROT_READ | PROT_WRITE);
}

static void a_write_that_is_under_way_is_seen(void **state) {
    enum { FAR = 40 }; /* a row beyond the first page of memory */
    char name[32];
    tms_shared_row_t row = 0;
    struct sigaction before, action = {.sa_handler = look_in_the_middle};
    const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    (void)state;
    for (int i = 0; i < FAR; i++) {
        snprintf(name, sizeof name, "tag-%d", i);
        row = allocate(name, 0, 0);
    }
    if (offsetof(tms_shared_page_contents_t, rows[FAR - 1]) < page_bytes) skip(); /* larger pages than this test knows */
    in_the_middle = TMS_SHARED_PAGE_FAILED;
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
    assert_int_equal(mprotect((char *)page.file.words + page_bytes, TMS_SHARED_PAGE_BYTES - page_bytes, PROT_READ), 0);
    tms_shared_page_change(&page, row, &(tms_shared_page_change_t){.resident_bytes = MIB});
    tms_shared_page_publish(&page);
    assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
    assert_int_equal(in_the_middle, TMS_SHARED_PAGE_BUSY);
    assert_int_equal(look().rows[FAR - 1].resident_bytes, MIB);
}

static void make_rows(void) {
    char name[32];
    for (int i = 0; i < ROWS; i++) {
        snprintf(name, sizeof name, "tag-%d", i);
        allocate(name, 0, 0);
    }
    meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(meeting != MAP_FAILED);
}

static void end_of_writes(void) {
    assert_int_equal(look().rows[ROWS - 1].resident_bytes, page.image->process.pauses_total);
    munmap(meeting, sizeof *meeting);
}

static void a_reader_never_sees_half_of_a_write(void **state) {
    (void)state;
    pthread_t writer;
    make_rows();
    assert_int_equal(pthread_create(&writer, NULL, write_on, NULL), 0);
    bool whole = read_whole_pages();
    pthread_join(writer, NULL);
    assert_true(whole);
    end_of_writes();
}

static void another_process_reads_too(void **state) {
    (void)state;
    int status = 0;
    make_rows();
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) end_child(read_whole_pages() ? 0 : 1);
    write_on(NULL);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    end_of_writes();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        PAGE_TEST(a_write_that_is_under_way_is_seen),
        PAGE_TEST(a_reader_never_sees_half_of_a_write),
        PAGE_TEST(another_process_reads_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
