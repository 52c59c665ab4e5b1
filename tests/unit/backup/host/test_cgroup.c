/* Guards the host store in a memory cgroup with a real limit: a batch that does not fit is an error, and no process is
 * killed. Each test creates a group below that of this process, if it has permission. */

#include "support/host_fixture.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "own_process.h"

#define LIMIT (768 * MIB)
enum { CANNOT_ENTER = 99 };

static const tms_error_context_t CONTEXT = {.operation = "pause", .device = 0, .tag = "weights"};

static char group[PATH_MAX];
static const char *limit_file;

static bool put(const char *name, unsigned long long number) {
    char path[PATH_MAX + NAME_MAX], text[32];
    (void)snprintf(path, sizeof path, "%s/%s", group, name);
    int length = snprintf(text, sizeof text, "%llu", number), fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return false;
    bool written = write(fd, text, (size_t)length) == length;
    return close(fd) == 0 && written;
}

/* The group of this process in the hierarchy that has `prefix` in /proc/self/cgroup. */
static bool find_own(const char *prefix, const char *mounted) {
    char *line = NULL;
    size_t capacity = 0;
    bool found = false;
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file && !found && getline(&line, &capacity, file) > 0) {
        const char *path = strstr(line, prefix);
        if (!path) continue;
        path += strlen(prefix);
        int length = (int)strcspn(path, "\n");
        int made =
            snprintf(group, sizeof group, "%s%.*s/tms-test-%d", mounted, length > 1 ? length : 0, path, (int)getpid());
        found = made > 0 && (size_t)made < sizeof group;
    }
    free(line);
    if (file) fclose(file);
    return found;
}

static int setup(void **state) {
    (void)state;
    const struct {
        const char *prefix, *mounted, *limit;
    } versions[] = {{":memory:", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"}, {"0::", "/sys/fs/cgroup", "memory.max"}};
    limit_file = NULL;
    for (int i = 0; i < 2 && !limit_file; i++) {
        if (!find_own(versions[i].prefix, versions[i].mounted) || mkdir(group, 0755) != 0) continue;
        if (put(versions[i].limit, LIMIT))
            limit_file = versions[i].limit;
        else
            (void)rmdir(group);
    }
    return 0;
}

static int teardown(void **state) {
    (void)state;
    /* An ended process may be counted in it for a moment. */
    for (int i = 0; limit_file && i < 1000 && rmdir(group) != 0 && errno == EBUSY; i++) usleep(1000);
    return 0;
}

#define EXPECT(condition)                                                                                                   \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            print_error("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                             \
            _exit(1);                                                                                                       \
        }                                                                                                                   \
    } while (0)

/* In the child: a store with production sizes, in the group. */
static host_fixture_t *begin(void) {
    void *state = NULL;
    if (!put("cgroup.procs", (unsigned long long)getpid())) _exit(CANNOT_ENTER);
    (void)setup_host(&state);
    host_fixture_t *f = state;
    tms_error_t error;
    f->store.chunk_bytes = TMS_HOST_CHUNK_BYTES;
    tms_host_limits_release(&f->store.limits); /* it is in another group now */
    EXPECT(tms_host_limits_init(&f->store.limits, "", UINT64_MAX, &error) == TMS_OK);
    return f;
}

static struct tms_host_batch *plan(host_fixture_t *f, uint64_t bytes, tms_host_buffer_t **buffer) {
    const tms_host_request_t request = {.bytes = bytes, .device = 0, .kind = TMS_BACKUP_PINNED};
    struct tms_host_batch *batch = NULL;
    tms_error_t error;
    EXPECT(tms_host_batch_create(&batch, &f->store, &CONTEXT, &error) == TMS_OK);
    EXPECT(tms_host_batch_add(batch, &request, buffer, &CONTEXT, &error) == TMS_OK);
    return batch;
}

static void end(host_fixture_t *f, struct tms_host_batch *batch, tms_host_buffer_t *buffer) {
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(buffer);
    tms_host_store_settle(&f->store);
    EXPECT(atomic_load(&f->store.resident_bytes) == 0);
    EXPECT(pinned_bytes() == 0);
}

/* A batch that fits is prepared, filled and released. */
static void go_on(host_fixture_t *f) {
    tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 64 * MIB, TMS_HOST_RELEASE);
    memset(buffer->memory, 1, 64 * MIB);
    end(f, NULL, buffer);
    (void)teardown_host((void **)&f);
}

static void ask_for_too_much(void) {
    host_fixture_t *f = begin();
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    struct tms_host_batch *batch = plan(f, 1024 * MIB, &buffer);
    EXPECT(tms_host_batch_start(batch, &CONTEXT, &error) == TMS_OUT_OF_HOST_MEMORY);
    EXPECT(strstr(error.message, group) && strstr(error.message, limit_file) && strstr(error.message, "768.0 MiB"));
    EXPECT(calls_made(CALL_MINCORE) == 0);
    end(f, batch, buffer);
    go_on(f);
}

static struct {
    char *memory;
    uint64_t bytes;
} other;

/* The rest of the program allocates memory meanwhile. */
static void take(int count) {
    enum { AT = 10 };
    if (count == AT) memset(other.memory, 1, other.bytes);
}

static void be_short_midway(void) {
    host_fixture_t *f = begin();
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    uint64_t part = 0;
    other.bytes = 256 * MIB;
    other.memory = mmap(NULL, other.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(other.memory != MAP_FAILED);
    f->store.prefaulting_threads = 1; /* nothing more is prefaulted meanwhile */
    on_touch(take);
    struct tms_host_batch *batch = plan(f, 384 * MIB, &buffer);
    EXPECT(tms_host_batch_start(batch, &CONTEXT, &error) == TMS_OK);
    EXPECT(tms_host_buffer_await(buffer, 384 * MIB - 1, NULL, &part, &CONTEXT, &error) == TMS_OUT_OF_HOST_MEMORY);
    EXPECT(strstr(error.message, limit_file));
    EXPECT(atomic_load(&f->store.resident_bytes) < 384 * MIB);
    on_touch(NULL);
    end(f, batch, buffer);
    munmap(other.memory, other.bytes);
    go_on(f);
}

static void run(void (*body)(void)) {
#ifdef __SANITIZE_THREAD__
    print_message("skipped: what the sanitizer keeps about memory counts in the group as well\n");
    skip();
#endif
    if (!limit_file) {
        print_message("skipped: no memory cgroup with a limit can be made here\n");
        skip();
    }
    int status = run_in_child(body);
    if (WIFSIGNALED(status)) fail_msg("killed by signal %d", WTERMSIG(status));
    if (WEXITSTATUS(status) == CANNOT_ENTER) {
        print_message("skipped: a process cannot be moved into a memory cgroup here\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void a_batch_that_does_not_fit_is_an_error(void **state) {
    (void)state;
    run(ask_for_too_much);
}

static void memory_exhausted_midway_is_an_error(void **state) {
    (void)state;
    run(be_short_midway);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_batch_that_does_not_fit_is_an_error),
        TEST(memory_exhausted_midway_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
