#include "base/shared_page_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"

enum {
    FILE_MODE = 0600,
    NAME_BYTES = 64, /* "tms-<pid>-<random>.page" and its NUL */
    WORDS = sizeof(tms_shared_page_contents_t) / sizeof(uint64_t),
    READ_ATTEMPTS = 1000, /* plenty, because a write is a short copy */
    NOT_OPEN = -1
};

tms_directory_choice_t tms_shared_page_directory(const char *configured) {
    return tms_private_directory(configured, "/dev/shm");
}

static bool fail(tms_directory_failure_t *failure, const char *call, int os_error) {
    *failure = (tms_directory_failure_t){.call = call, .os_error = os_error};
    return false;
}

/* Makes names unique, because two processes in different PID namespaces may have the same number. */
static uint64_t random_number(void) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof(number), GRND_NONBLOCK) == (ssize_t)sizeof(number)) return number;
    return tms_clock_nanoseconds() ^ (uint64_t)(uintptr_t)&number;
}

/* Checked in advance, because a file that grows beyond RLIMIT_FSIZE raises SIGXFSZ. */
static bool check_size_limit(tms_directory_failure_t *failure) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return true;
    return limit.rlim_cur >= TMS_SHARED_PAGE_BYTES || fail(failure, "the check of RLIMIT_FSIZE", EFBIG);
}

static bool fill(tms_shared_page_file_t *file, tms_directory_failure_t *failure) {
    int os_error;
    /* The file is locked before it is long enough to be a page, because a reader removes a page that it can lock. */
    if (flock(file->fd, LOCK_EX | LOCK_NB) != 0) return fail(failure, "flock", errno);
    if (!check_size_limit(failure)) return false;
    do os_error = posix_fallocate(file->fd, 0, TMS_SHARED_PAGE_BYTES);
    while (os_error == EINTR);
    if (os_error != 0) return fail(failure, "posix_fallocate", os_error);
    void *mapped = mmap(NULL, TMS_SHARED_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);
    if (mapped == MAP_FAILED) return fail(failure, "mmap", errno);
    file->words = mapped;
    return true;
}

bool tms_shared_page_file_create(tms_shared_page_file_t *file, const char *configured, tms_directory_failure_t *failure) {
    char name[NAME_BYTES];
    const tms_directory_choice_t place = tms_shared_page_directory(configured);
    file->fd = NOT_OPEN;
    file->words = NULL;
    int directory = tms_private_directory_open(&place, file->path, failure);
    if (directory < 0) return false;
    snprintf(name, sizeof(name), "tms-%ld-%016llx.page", (long)getpid(), (unsigned long long)random_number());
    size_t length = strlen(file->path);
    bool made =
        (size_t)snprintf(file->path + length, sizeof(file->path) - length, "/%s", name) < sizeof(file->path) - length;
    if (!made) fail(failure, "open", ENAMETOOLONG);
    if (made) {
        file->fd = openat(directory, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, FILE_MODE);
        made = file->fd >= 0 || fail(failure, "openat", errno);
    }
    if (made && !fill(file, failure)) {
        made = false;
        (void)unlinkat(directory, name, 0);
        close(file->fd);
        file->fd = NOT_OPEN;
    }
    close(directory);
    return made;
}

void tms_shared_page_file_unlink(tms_shared_page_file_t *file) {
    if (file->words) (void)unlink(file->path);
}

void tms_shared_page_file_close(tms_shared_page_file_t *file) {
    if (!file->words) return;
    /* Closed without unlocking, which would release the parent's lock too. */
    (void)munmap((void *)file->words, TMS_SHARED_PAGE_BYTES);
    close(file->fd);
    file->fd = NOT_OPEN;
    file->words = NULL;
}

/* ---- readers ---- */

/* Whether a file is as long as a page, so that no access to its mapping is beyond its end. */
static bool is_whole(int fd) {
    struct stat found;
    if (fstat(fd, &found) != 0) return false;
    if (S_ISREG(found.st_mode) && found.st_size >= TMS_SHARED_PAGE_BYTES) return true;
    errno = ENODATA;
    return false;
}

static tms_shared_word_t *map(int fd, int protection) {
    if (!is_whole(fd)) return NULL;
    void *mapped = mmap(NULL, TMS_SHARED_PAGE_BYTES, protection, MAP_SHARED, fd, 0);
    return mapped == MAP_FAILED ? NULL : mapped;
}

/* One attempt: see tms_shared_page.h. */
static bool copy_words(tms_shared_word_t *words, uint64_t copy[WORDS]) {
    const uint64_t before = atomic_load_explicit(&words[TMS_SHARED_WORD(sequence)], memory_order_acquire);
    if (before % 2 != 0) return false;
    for (size_t i = 0; i < WORDS; i++) copy[i] = atomic_load_explicit(&words[i], memory_order_acquire);
    return atomic_load_explicit(&words[TMS_SHARED_WORD(sequence)], memory_order_relaxed) == before;
}

tms_shared_page_reading_t tms_shared_page_file_read(int fd, tms_shared_page_contents_t *copy) {
    memset(copy, 0, sizeof(*copy));
    tms_shared_word_t *words = map(fd, PROT_READ);
    if (!words) return errno == ENODATA ? TMS_SHARED_PAGE_FOREIGN : TMS_SHARED_PAGE_FAILED;
    copy->magic = atomic_load_explicit(&words[TMS_SHARED_WORD(magic)], memory_order_acquire);
    copy->format = atomic_load_explicit(&words[TMS_SHARED_WORD(format)], memory_order_relaxed);
    tms_shared_page_reading_t result = TMS_SHARED_PAGE_FOREIGN;
    if (copy->magic == TMS_SHARED_PAGE_MAGIC && copy->format == TMS_SHARED_PAGE_FORMAT) {
        result = TMS_SHARED_PAGE_BUSY;
        for (int attempt = 0; result == TMS_SHARED_PAGE_BUSY && attempt < READ_ATTEMPTS; attempt++) {
            if (copy_words(words, (uint64_t *)copy))
                result = TMS_SHARED_PAGE_READ;
            else
                (void)sched_yield();
        }
    }
    (void)munmap((void *)words, TMS_SHARED_PAGE_BYTES);
    return result;
}

bool tms_shared_page_file_request(int fd, unsigned kind, bool withdraw) {
    const uint64_t bit = UINT64_C(1) << kind;
    tms_shared_word_t *words = map(fd, PROT_READ | PROT_WRITE);
    if (!words) return false;
    if (withdraw)
        atomic_fetch_and(&words[TMS_SHARED_WORD(requests)], ~bit);
    else
        atomic_fetch_or(&words[TMS_SHARED_WORD(requests)], bit);
    (void)munmap((void *)words, TMS_SHARED_PAGE_BYTES);
    return true;
}
