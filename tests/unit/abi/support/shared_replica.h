/* Shared by the tests of whole processes with shared backups: a folder in memory for each test, and replicas, which are
 * processes that execute this program again. Included once in a program, whose `main` begins with REPLICA_MAIN.
 *
 * A replica executes the commands on its standard input, one a line, and answers each with a line: "ok" and numbers, or the
 * error. A failed assertion ends it. At the end of its input it exits as programs do, with handlers. */
#ifndef TMS_TESTS_SHARED_REPLICA_H
#define TMS_TESTS_SHARED_REPLICA_H

#include "abi/interface.h"
#include "abi/state.h"
#include "support.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backup/shared/types.h"
#include "own_process.h"
#include "temporary.h"

/* Contents of OBJECT_BYTES and a private tail. */
enum { OBJECT_BYTES = 512 << 10, TAIL_BYTES = 4, CONTENT_BYTES = OBJECT_BYTES + TAIL_BYTES, LINE_BYTES = 1024, TENSORS = 8 };

/* ---- the replica ---- */

typedef struct tensor {
    uint64_t address;
    uint32_t seed;
} tensor_t;

static tensor_t tensors[TENSORS];
static size_t tensor_count;
static const tms_api_t *api;
static pthread_t pausing;

static inline void replica_answer(const char *text) {
    printf("%s\n", text);
    fflush(stdout);
}

static inline void replica_allocate(uint32_t seed, int device) {
    tms_error_t error;
    const tms_region_settings_t settings = {.managed = 1, .backup = TMS_BACKUP_SHARED, .tag = "weights"};
    uint64_t region = 0;
    tensor_t *tensor = &tensors[tensor_count++];
    ASSERT_OK(api->region_enter(&settings, 0, &region, &error), error);
    ASSERT_OK(api->allocate(CONTENT_BYTES, device, &tensor->address, &error), error);
    assert_int_equal(api->region_leave(region), 0);
    tensor->seed = seed;
    fill(tensor->address, CONTENT_BYTES, seed);
}

static inline void replica_refill(size_t index, uint32_t seed) {
    assert_true(index < tensor_count);
    tensors[index].seed = seed;
    fill(tensors[index].address, CONTENT_BYTES, seed);
}

static inline void replica_check(void) {
    for (size_t i = 0; i < tensor_count; i++) assert_filled(tensors[i].address, CONTENT_BYTES, tensors[i].seed);
}

/* Whether every tensor is in that state. */
static inline bool replica_all_are(tms_segment_state_t state) {
    tms_segment_info_t row;
    for (size_t i = 0; i < tensor_count; i++) {
        if (api->find(tensors[i].address, 1, &row) != TMS_OK || (tms_segment_state_t)row.state != state) return false;
    }
    return true;
}

static inline void replica_pause(void) {
    tms_error_t error;
    tms_report_t report;
    const tms_selection_t all = {0};
    char text[sizeof error.message + LINE_BYTES];
    if (api->pause(&all, &report, &error) == TMS_OK) {
        assert_true(replica_all_are(TMS_SEGMENT_PAUSED));
        snprintf(text, sizeof text, "ok %llu %llu", (unsigned long long)report.copied_bytes,
                 (unsigned long long)report.unchanged_bytes);
    } else {
        assert_true(replica_all_are(TMS_SEGMENT_ACTIVE));
        snprintf(text, sizeof text, "%s: %s", tms_status_name(error.status), error.message);
    }
    replica_answer(text);
}

static inline void replica_resume(void) {
    tms_error_t error;
    const tms_selection_t all = {0};
    ASSERT_OK(api->resume(&all, NULL, &error), error);
    replica_check();
}

static void *replica_pause_aside(void *argument) {
    const tms_selection_t all = {0};
    (void)api->pause(&all, NULL, argument);
    return NULL;
}

static inline CUresult wait_for_ever(void *memory, size_t bytes, unsigned int flags) {
    (void)memory, (void)bytes, (void)flags;
    for (;;) pause();
    return CUDA_SUCCESS;
}

/* The driver's table, for a test that replaces a function in it. */
static inline tms_driver_table_t *replica_driver(void) {
    return (tms_driver_table_t *)(uintptr_t)atomic_load(&tms_state_if_made()->driver.table);
}

/* From now on a registration never ends. */
static inline void replica_hold_registrations(void) { replica_driver()->cuMemHostRegister = wait_for_ever; }

static sem_t held, go_on;
static bool outlives; /* the other thread's pause outlives the exit handlers */
static CUresult (*copies)(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
static CUresult (*launches)(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                            unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                            CUstream stream, void **parameters, void **extra);

static inline void replica_hold(void) {
    sem_post(&held);
    while (sem_wait(&go_on) != 0) continue;
    sem_post(&go_on); /* for the next thread */
}

static inline CUresult copy_later(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    if (bytes > TAIL_BYTES) replica_hold();
    return copies(to, from, bytes, stream);
}

static inline CUresult launch_later(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                    unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                    unsigned int shared_bytes, CUstream stream, void **parameters, void **extra) {
    replica_hold();
    return launches(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters, extra);
}

static bool traced, ends_at_once;

/* From here on a tracer may count and kill, which begins and ends with a signal. */
static inline void replica_trace(bool begins) {
    if (begins) assert_int_equal(ptrace(PTRACE_TRACEME, 0, NULL, NULL), 0);
    raise(begins ? SIGSTOP : SIGUSR1);
}

/* Runs after the exit handlers of the library, because it was registered first. A forked child does not look for leaks,
 * because the library has forgotten what belongs to the parent, and a process with a thread that never ends does not look
 * for that. */
static inline void replica_at_exit(void) {
    if (ends_at_once) end_child(0);
    if (traced) replica_trace(false);
    if (!outlives) return;
    sem_post(&go_on);
    assert_int_equal(pthread_join(pausing, NULL), 0);
}

/* Begins a pause on another thread. Returns once that has come to the kernel that computes fingerprints, or to the copy of
 * an object. It goes on after the exit handlers of the library, if it `may`. */
static inline void replica_pause_held(bool copying, bool may) {
    static tms_error_t error;
    tms_driver_table_t *driver = replica_driver();
    copies = driver->cuMemcpyDtoHAsync;
    launches = driver->cuLaunchKernel;
    if (copying)
        driver->cuMemcpyDtoHAsync = copy_later;
    else
        driver->cuLaunchKernel = launch_later;
    outlives = may;
    ends_at_once = !may;
    assert_int_equal(pthread_create(&pausing, NULL, replica_pause_aside, &error), 0);
    while (sem_wait(&held) != 0) continue;
}

static inline void replica_await_registrar(void) {
    tms_shared_store_t *store = &tms_state_if_made()->saver.stores.shared;
    pthread_mutex_lock(&store->lock);
    while (store->registrar_runs) pthread_cond_wait(&store->changed, &store->lock);
    pthread_mutex_unlock(&store->lock);
}

/* A child that lives until it is killed, or ends as programs do. */
static inline void replica_fork(bool lives) {
    char text[LINE_BYTES];
    int status = 0;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    ends_at_once = child == 0;
    if (child == 0 && !lives) exit(0);
    if (child == 0) {
        const int nothing = open("/dev/null", O_RDWR);
        for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) dup2(nothing, fd); /* it keeps no pipe of the test open */
        alarm(60);
        for (;;) pause();
    }
    if (!lives) assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    snprintf(text, sizeof text, "ok %d", (int)child);
    replica_answer(text);
}

/* Changes, pauses, resumes and checks, so many times. */
static inline void replica_loop(int count) {
    const tms_selection_t all = {0};
    for (int i = 0; i < count; i++) {
        tms_error_t error;
        replica_refill((size_t)i % tensor_count, 100 + (uint32_t)i % 3);
        ASSERT_OK(api->pause(&all, NULL, &error), error);
        if (i % 2) replica_await_registrar();
        replica_resume();
    }
}

static inline void replica_do(const char *line) {
    unsigned first = 0, second = 0;
    char word[LINE_BYTES] = "";
    sscanf(line, "%1023s %u %u", word, &first, &second);
    if (strcmp(word, "pause") == 0) return replica_pause();
    if (strcmp(word, "fork") == 0) return replica_fork(first != 0);
    if (strcmp(word, "traced_pause") == 0) {
        replica_trace(true);
        replica_pause();
        return replica_trace(false);
    }
    if (strcmp(word, "traced_exit") == 0) {
        traced = true;
        replica_trace(true);
        exit(0);
    }
    if (strcmp(word, "execute") == 0) execlp("cat", "cat", (char *)NULL);
    if (strcmp(word, "exit") == 0) exit(0);
    if (strcmp(word, "allocate") == 0)
        replica_allocate(first, (int)second);
    else if (strcmp(word, "refill") == 0)
        replica_refill(first, second);
    else if (strcmp(word, "resume") == 0)
        replica_resume();
    else if (strcmp(word, "loop") == 0)
        replica_loop((int)first);
    else if (strcmp(word, "pause_held") == 0)
        replica_pause_held(first != 0, second != 0);
    else if (strcmp(word, "hold_registrations") == 0)
        replica_hold_registrations();
    else if (strcmp(word, "await_registrar") == 0)
        replica_await_registrar();
    else
        fail_msg("no command '%s'", line);
    replica_answer("ok");
}

static inline int replica_run(void) {
    char line[LINE_BYTES];
    api = tms_get_api(tms_interface());
    simulator()->reset(2, 64 * MIB);
    setvbuf(stdin, NULL, _IONBF, 0); /* the next program reads the rest */
    sem_init(&held, 0, 0);
    sem_init(&go_on, 0, 0);
    assert_int_equal(atexit(replica_at_exit), 0);
    while (fgets(line, sizeof line, stdin)) {
        alarm(60); /* for one command */
        replica_do(line);
        alarm(0);
    }
    return 0;
}

#define REPLICA_MAIN(argc, argv)                                                                                            \
    if ((argc) > 1 && strcmp((argv)[1], "replica") == 0) return replica_run();

/* ---- the test ---- */

static char base[TEMPORARY_BYTES], root[TEMPORARY_BYTES]; /* `base` is a directory in memory, `root` the folder in it */

static inline int make(void **state) {
    (void)state;
    simulator(); /* fails with a clear message if there is none */
    snprintf(base, sizeof base, "/dev/shm/tms-test-replica-XXXXXX");
    if (!mkdtemp(base)) return -1;
    snprintf(root, sizeof root, "%.200s/store", base);
    return setenv("TMS_SHARED_DIR", root, 1);
}

static inline int release(void **state) {
    (void)state;
    return remove_temporary_directory(base);
}

typedef struct replica {
    pid_t pid;
    FILE *to, *from;
} replica_t;

static inline replica_t start(void) {
    int down[2], up[2];
    assert_int_equal(pipe2(down, O_CLOEXEC), 0);
    assert_int_equal(pipe2(up, O_CLOEXEC), 0);
    fflush(NULL);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* also if a test has failed, and a replica is stopped */
        dup2(down[0], STDIN_FILENO);
        dup2(up[1], STDOUT_FILENO);
        execute_again("replica");
        _exit(127);
    }
    close(down[0]);
    close(up[1]);
    return (replica_t){.pid = pid, .to = fdopen(down[1], "w"), .from = fdopen(up[0], "r")};
}

static inline void tell(const replica_t *replica, const char *command) {
    assert_true(fprintf(replica->to, "%s\n", command) > 0);
    assert_int_equal(fflush(replica->to), 0);
}

/* Returns the next answer, without the end of the line. */
static inline const char *hear(const replica_t *replica) {
    static char line[2 * LINE_BYTES];
    if (!fgets(line, sizeof line, replica->from)) fail_msg("the replica has ended");
    line[strcspn(line, "\n")] = '\0';
    return line;
}

static inline void assert_ok_answer(const replica_t *replica, const char *command) {
    const char *answer = hear(replica);
    if (strncmp(answer, "ok", 2) != 0) fail_msg("%s: %s", command, answer);
}

static inline void ask(const replica_t *replica, const char *command) {
    tell(replica, command);
    assert_ok_answer(replica, command);
}

/* Asks for a pause that copies so many bytes. */
static inline void pause_replica(const replica_t *replica, uint64_t copied, uint64_t unchanged) {
    char expected[LINE_BYTES];
    snprintf(expected, sizeof expected, "ok %llu %llu", (unsigned long long)copied, (unsigned long long)unchanged);
    tell(replica, "pause");
    assert_string_equal(hear(replica), expected);
}

static inline int end(const replica_t *replica) {
    int status = -1;
    fclose(replica->to);
    assert_int_equal(waitpid(replica->pid, &status, 0), replica->pid);
    fclose(replica->from);
    return status;
}

static inline void assert_ends_well(const replica_t *replica) { assert_int_equal(end(replica), 0); }

static inline void kill_replica(const replica_t *replica) {
    assert_int_equal(kill(replica->pid, SIGKILL), 0);
    assert_true(WIFSIGNALED(end(replica)));
}

/* ---- the folder ---- */

static inline const char *below(const char *name) {
    static char paths[4][PATH_MAX];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, PATH_MAX, "%s/%s", root, name);
    return path;
}

/* Calls `see` with each name of a directory, if there is one. Returns their number. */
static inline size_t for_each(const char *directory, void (*see)(const char *name)) {
    size_t count = 0;
    DIR *list = opendir(below(directory));
    for (const struct dirent *entry; list && (entry = readdir(list));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (see) see(entry->d_name);
        count++;
    }
    if (list) closedir(list);
    return count;
}

static inline void assert_locked(const char *name) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/holders/%s/lock", root, name);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0) fail_msg("the holder %s belongs to no process", name);
    close(fd);
}

static size_t total_links;

static inline void count_links(const char *name) {
    struct stat found;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/objects/%s", root, name);
    if (strlen(name) != TMS_SHARED_NAME_DIGITS) fail_msg("%s is no object", name);
    assert_int_equal(lstat(path, &found), 0);
    assert_int_equal(found.st_mode & 07777, 0400);
    assert_int_equal(found.st_size, OBJECT_BYTES);
    total_links += found.st_nlink - 1;
}

/* Asserts that the folder has its key, so many holders of living processes, so many whole objects, to which these holders
 * have so many links, and nothing else. */
static inline void assert_folder(size_t holders, size_t objects, size_t links) {
    total_links = 0;
    assert_int_equal(for_each("holders", assert_locked), holders);
    assert_int_equal(for_each("objects", count_links), objects);
    assert_int_equal(total_links, links);
    assert_int_equal(for_each(".", NULL), 3);
    struct stat key;
    assert_int_equal(lstat(below("key"), &key), 0);
    assert_int_equal(key.st_nlink, 1);
}

#endif
