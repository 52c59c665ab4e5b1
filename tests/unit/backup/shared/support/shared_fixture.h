/* Shared by the tests of the shared store's folder: a folder in memory for each test, its objects, and other processes.
 * Included once in a program, after cmocka.h. */
#ifndef TMS_TESTS_SHARED_FIXTURE_H
#define TMS_TESTS_SHARED_FIXTURE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backup/shared/entry.h"
#include "temporary.h"

enum { OBJECT_BYTES = 10000, PATIENCE_SECONDS = 120, NAMES_OF_TEST = 64 };

static const tms_error_context_t context = {.operation = "pause", .device = 0, .bytes = OBJECT_BYTES, .tag = "weights"};
static char base[TEMPORARY_BYTES]; /* a directory in memory */
static char root[TEMPORARY_BYTES]; /* the folder, below it */
static tms_log_t quiet;
static tms_error_t error;

/* In a child, where an assertion of cmocka cannot end the test: ends the child with status 1. */
#define CHECK(condition)                                                                                                    \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            dprintf(STDERR_FILENO, "%s:%d: not true in a child: %s; errno %d; %s\n", __FILE__, __LINE__, #condition, errno, \
                    error.message);                                                                                         \
            _exit(1);                                                                                                       \
        }                                                                                                                   \
    } while (0)

static inline int make(void **state) {
    (void)state;
    snprintf(base, sizeof base, "/dev/shm/tms-test-store-XXXXXX");
    tms_log_init(&quiet, TMS_LOG_SILENT);
    if (!mkdtemp(base)) return -1;
    snprintf(root, sizeof root, "%.200s/store", base);
    return 0;
}

static inline int release(void **state) {
    (void)state;
    return remove_temporary_directory(base);
}

/* A path below the folder, in one of a few buffers. */
static inline const char *below(const char *name) {
    static char paths[8][PATH_MAX];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", root, name);
    return path;
}

static inline bool exists(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0;
}

static inline unsigned links_of(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0 ? (unsigned)found.st_nlink : 0;
}

static inline unsigned mode_of(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0 ? found.st_mode & 07777 : 0;
}

/* The number of names in a directory. */
static inline unsigned count_names(const char *path) {
    unsigned count = 0;
    DIR *list = opendir(path);
    for (const struct dirent *entry; list && (entry = readdir(list));)
        count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    if (list) closedir(list);
    return count;
}

static inline void put_file(const char *path, const char *text, mode_t mode) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static inline tms_shared_folder_t *open_folder(void) {
    tms_shared_folder_t *folder = malloc(sizeof *folder);
    assert_non_null(folder);
    if (tms_shared_folder_open(folder, root, &quiet, &context, &error) != TMS_OK) fail_msg("%s", error.message);
    return folder;
}

static inline void close_folder(tms_shared_folder_t *folder) {
    tms_shared_folder_close(folder, &quiet);
    free(folder);
}

/* Asserts that the folder is refused with its name, and that the message has `text`. */
static inline void assert_refused(const char *configured, const char *text) {
    tms_shared_folder_t folder;
    assert_int_equal(tms_shared_folder_open(&folder, configured, &quiet, &context, &error), TMS_BACKUP_IO);
    if (!strstr(error.message, text)) fail_msg("no '%s' in: %s", text, error.message);
    assert_non_null(strstr(error.message, "pause: a backup could not be used"));
    assert_non_null(strstr(error.message, configured));
    assert_string_equal(error.operation, "pause");
    assert_int_equal(folder.root, -1);
    assert_null(folder.key);
}

/* ---- objects ---- */

static inline tms_shared_name_t name_of(unsigned number) {
    tms_shared_name_t name;
    snprintf(name.text, sizeof name.text, "%0*x", TMS_SHARED_NAME_DIGITS, number);
    return name;
}

static inline const char *object_path(unsigned number, const char *end) {
    char name[96];
    snprintf(name, sizeof name, "objects/%s%s", name_of(number).text, end);
    return below(name);
}

static inline const char *holder_path(const tms_shared_folder_t *folder, const char *file) {
    char name[160];
    snprintf(name, sizeof name, "holders/%s/%s", folder->holder_name, file);
    return below(name);
}

/* The contents of an object depend on its number. */
static inline const char *contents_of(unsigned number) {
    static char contents[OBJECT_BYTES];
    for (size_t i = 0; i < OBJECT_BYTES; i++) contents[i] = (char)(i * 7 + i / 256 + number);
    return contents;
}

static inline tms_status_t try_object(const tms_shared_folder_t *folder, unsigned number, bool claim,
                                      tms_shared_attempt_t *attempt) {
    const tms_shared_name_t name = name_of(number);
    return tms_shared_entry_try(folder, &name, OBJECT_BYTES, claim, attempt, &context, &error);
}

static inline tms_status_t write_part(const tms_shared_folder_t *folder, unsigned number, int fd, uint64_t from,
                                      uint64_t to) {
    const tms_shared_name_t name = name_of(number);
    return tms_shared_entry_write(folder, &name, fd, contents_of(number) + from, to - from, from, &context, &error);
}

static inline tms_status_t finish(const tms_shared_folder_t *folder, unsigned number, int *fd) {
    const tms_shared_name_t name = name_of(number);
    return tms_shared_entry_finish(folder, &name, fd, &context, &error);
}

static inline void drop(const tms_shared_folder_t *folder, unsigned number) {
    const tms_shared_name_t name = name_of(number);
    tms_shared_entry_drop(folder, &name);
}

static inline void abandon(const tms_shared_folder_t *folder, unsigned number, int fd) {
    const tms_shared_name_t name = name_of(number);
    tms_shared_entry_abandon(folder, &name, fd);
}

/* Whether an open file has the contents of that object. */
static inline bool has_contents(int fd, unsigned number) {
    char found[OBJECT_BYTES + 1];
    return pread(fd, found, sizeof found, 0) == OBJECT_BYTES && memcmp(found, contents_of(number), OBJECT_BYTES) == 0;
}

/* Holds an object, and writes it if it does not exist. False if it is busy or a call fails. */
static inline bool get_object(const tms_shared_folder_t *folder, unsigned number, bool *written) {
    tms_shared_attempt_t attempt;
    if (try_object(folder, number, true, &attempt) != TMS_OK || attempt.state == TMS_SHARED_BUSY) return false;
    if (written) *written = attempt.state == TMS_SHARED_CLAIMED;
    if (attempt.state == TMS_SHARED_CLAIMED &&
        (write_part(folder, number, attempt.fd, 0, OBJECT_BYTES) != TMS_OK || finish(folder, number, &attempt.fd) != TMS_OK))
        return false;
    bool good = has_contents(attempt.fd, number);
    close(attempt.fd);
    return good;
}

/* Asserts that the folder has nothing but its key. */
static inline void assert_nothing_left(void) {
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(count_names(below("holders")), 0);
    assert_int_equal(count_names(root), exists(below("key")) + exists(below("objects")) + exists(below("holders")));
}

/* ---- other processes ---- */

/* A child, with pipes in both directions. */
typedef struct child {
    pid_t pid;
    int to, from;
} child_t;

static inline child_t start(void (*body)(const child_t *parent)) {
    int down[2], up[2];
    assert_int_equal(pipe2(down, O_CLOEXEC), 0);
    assert_int_equal(pipe2(up, O_CLOEXEC), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const child_t parent = {.pid = getppid(), .to = up[1], .from = down[0]};
        close(down[1]);
        close(up[0]);
        alarm(PATIENCE_SECONDS);
        body(&parent);
        _exit(0);
    }
    close(down[0]);
    close(up[1]);
    return (child_t){.pid = pid, .to = down[1], .from = up[0]};
}

static inline void tell(const child_t *other) {
    char byte = 'x';
    if (write(other->to, &byte, 1) != 1) perror("write to the other process");
}

/* Waits for a message. False if the other process has ended. */
static inline bool hear(const child_t *other) {
    char byte;
    ssize_t got;
    do got = read(other->from, &byte, 1);
    while (got < 0 && errno == EINTR);
    return got == 1;
}

/* Waits for the end of a child. Returns its status. */
static inline int end(const child_t *child) {
    int status = -1;
    close(child->to);
    close(child->from);
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    return status;
}

static inline void kill_child(const child_t *child) {
    kill(child->pid, SIGKILL);
    assert_true(WIFSIGNALED(end(child)));
}

static inline void assert_ends_well(const child_t *child) { assert_int_equal(end(child), 0); }

#endif
