#include "base/shared_page_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/random.h"
#include "base/size_limit.h"

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

static bool fill(tms_shared_page_file_t *file, tms_directory_failure_t *failure) {
    int os_error;
    /* The file is locked before it is long enough to be a page, because a reader removes a page that it can lock. */
    if (flock(file->fd, LOCK_EX | LOCK_NB) != 0) return fail(failure, "flock", errno);
    os_error = tms_size_limit_check(TMS_SHARED_PAGE_BYTES);
    if (os_error != 0) return fail(failure, "the check of RLIMIT_FSIZE", os_error);
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
    /* Two processes in different PID namespaces may have the same number. */
    snprintf(name, sizeof(name), "tms-%ld-%016llx.page", (long)getpid(), (unsigned long long)tms_random_number());
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

/* Whether a file is as long as a page. A file that is truncated later is read short, which `read_words` reports. */
static bool is_whole(int fd) {
    struct stat found;
    if (fstat(fd, &found) != 0) return false;
    if (S_ISREG(found.st_mode) && found.st_size >= TMS_SHARED_PAGE_BYTES) return true;
    errno = ENODATA;
    return false;
}

/* Reads words that begin with word `first`. Later reads come after it in memory order too. */
static bool read_words(int fd, size_t first, size_t count, uint64_t *words) {
    const ssize_t bytes = (ssize_t)(count * sizeof(*words));
    ssize_t got;
    do got = pread(fd, words, (size_t)bytes, (off_t)(first * sizeof(*words)));
    while (got < 0 && errno == EINTR);
    if (got >= 0 && got != bytes) errno = ENODATA;
    atomic_thread_fence(memory_order_acquire);
    return got == bytes;
}

/* Makes one attempt (tms_shared_page.h). *whole is false if a write was under way. */
static bool copy_page(int fd, tms_shared_page_contents_t *copy, bool *whole) {
    uint64_t before, after;
    if (!read_words(fd, TMS_SHARED_WORD(sequence), 1, &before)) return false;
    *whole = before % 2 == 0;
    if (!*whole) return true;
    if (!read_words(fd, 0, WORDS, (uint64_t *)copy) || !read_words(fd, TMS_SHARED_WORD(sequence), 1, &after)) return false;
    *whole = before == after;
    return true;
}

tms_shared_page_reading_t tms_shared_page_file_read(int fd, tms_shared_page_contents_t *copy) {
    bool whole = false;
    memset(copy, 0, sizeof(*copy));
    bool readable = is_whole(fd) && read_words(fd, 0, TMS_SHARED_WORD(sequence), (uint64_t *)copy);
    if (readable && (copy->magic != TMS_SHARED_PAGE_MAGIC || copy->format != TMS_SHARED_PAGE_FORMAT))
        return TMS_SHARED_PAGE_FOREIGN;
    for (int attempt = 0; readable && !whole && attempt < READ_ATTEMPTS; attempt++) {
        readable = copy_page(fd, copy, &whole);
        if (readable && !whole) (void)sched_yield();
    }
    if (readable) return whole ? TMS_SHARED_PAGE_READ : TMS_SHARED_PAGE_BUSY;
    return errno == ENODATA ? TMS_SHARED_PAGE_FOREIGN : TMS_SHARED_PAGE_FAILED;
}

bool tms_shared_page_file_request(int fd, unsigned kind, bool withdraw) {
    const uint64_t word = withdraw ? 0 : 1;
    ssize_t written;
    if (!is_whole(fd)) return false;
    do written = pwrite(fd, &word, sizeof(word), (off_t)((TMS_SHARED_WORD(requests) + kind) * sizeof(word)));
    while (written < 0 && errno == EINTR);
    return written == (ssize_t)sizeof(word);
}
