/* Guards the simulated GPU in whole processes: its environment, which devices are visible, its report at exit, and budgets
 * that processes share. This program starts itself again in the roles that the tests need. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/holder_fixture.h"

/* Leaks one of everything. */
static int leak(void) {
    void *host = NULL;
    CUdeviceptr memory = 0;
    CUstream stream = NULL;
    if (CALL(cuInit, 0) != CUDA_SUCCESS) return CHILD_FAILED;
    CALL(cuCtxPushCurrent_v2, retain_primary(0));
    make_block(0, GRANULE);
    CALL(cuMemAlloc_v2, &memory, 1);
    CALL(cuMemHostAlloc, &host, 4096, 0);
    CALL(cuStreamCreate, &stream, 0);
    return CALL(launch_add, stream, memory, 1, 1, 1); /* waits for a gate that never opens, and must not block the exit */
}

static int leave_nothing(void) {
    block_t block;
    if (CALL(cuInit, 0) != CUDA_SUCCESS) return CHILD_FAILED;
    block = make_block(0, GRANULE);
    drop_block(&block);
    return 0;
}

static void the_report_lists_leaks(void **state) {
    static const char *const variables[] = {"TMS_SIMULATED_REPORT=1", NULL}, *const silent[] = {"TMS_SIMULATED_REPORT=0",
                                                                                                NULL};
    char output[OUTPUT_BYTES];
    (void)state;
    assert_int_equal(run_again("leak", variables, output, sizeof output), 0);
    assert_string_equal(
        output, "simulated GPU: in use at the end on device 0: 4194304 bytes in 1 handles and 1 runtime allocations, "
                "1 mappings, 1 streams\n"
                "simulated GPU: in use at the end in the process: 1 reservations, 4096 bytes of pinned host memory\n");
    assert_int_equal(run_again("leave_nothing", variables, output, sizeof output), 0);
    assert_string_equal(output, "simulated GPU: nothing in use at the end\n");
    assert_int_equal(run_again("leak", silent, output, sizeof output), 0);
    assert_string_equal(output, "");
}

/* Prints the configuration from the environment to stderr. */
static int describe(void) {
    int count = -1, can = -1;
    size_t total = 0;
    CUdeviceptr address = 0;
    CUresult init = CALL(cuInit, 0), reserve = CALL(cuMemAddressReserve, &address, GRANULE, 0, 0, 0);
    CALL(cuDeviceGetCount, &count);
    CALL(cuDeviceTotalMem_v2, &total, 0);
    CALL(cuDeviceCanAccessPeer, &can, 0, 1);
    fprintf(stderr, "init %d, devices %d, bytes %zu, peers %d, reserve %d\n", init, count, total, can, reserve);
    return 0;
}

static void the_environment_configures(void **state) {
    static const char *const variables[] = {"TMS_SIMULATED_DEVICES=3", "TMS_SIMULATED_MEMORY=96MiB", "TMS_SIMULATED_PEERS=0",
                                            "TMS_SIMULATED_FAULT=cuInit:5:1:3,cuMemAddressReserve:0:1:999", NULL};
    static const char *const wrong[] = {"TMS_SIMULATED_DEVICES=9", "TMS_SIMULATED_MEMORY=1 GB", "TMS_SIMULATED_PEERS=yes",
                                        "TMS_SIMULATED_FAULT=cuInit:x,cuNothing:0:1:2", NULL};
    static const char *const none[] = {"TMS_SIMULATED_DEVICES=0", "TMS_SIMULATED_MEMORY=", NULL};
    char output[OUTPUT_BYTES];
    (void)state;
    assert_int_equal(run_again("describe", variables, output, sizeof output), 0);
    assert_string_equal(output, "init 0, devices 3, bytes 100663296, peers 0, reserve 999\n");
    assert_int_equal(run_again("describe", wrong, output, sizeof output), 0);
    assert_string_equal(output,
                        "simulated GPU: TMS_SIMULATED_DEVICES=9 is ignored: invalid value\n"
                        "simulated GPU: TMS_SIMULATED_MEMORY=1 GB is ignored: invalid value\n"
                        "simulated GPU: TMS_SIMULATED_PEERS=yes is ignored: invalid value\n"
                        "simulated GPU: TMS_SIMULATED_FAULT=cuInit:x is ignored: the form is call:succeed:fail:code\n"
                        "simulated GPU: TMS_SIMULATED_FAULT=cuNothing:0:1:2 is ignored: there is no such function\n"
                        "init 0, devices 1, bytes 8589934592, peers -1, reserve 0\n");
    assert_int_equal(run_again("describe", none, output, sizeof output), 0);
    assert_string_equal(output, "init 100, devices -1, bytes 0, peers -1, reserve 3\n");
}

/* Prints which of the machine's devices this process sees, in its order. */
static int describe_visible(void) {
    int count = 0;
    CUresult init = CALL(cuInit, 0);
    CALL(cuDeviceGetCount, &count);
    fprintf(stderr, "init %d:", init);
    for (int device = 0; device < count; device++) {
        CUuuid uuid;
        char bus[16] = "";
        CALL(cuDeviceGetUuid_v2, &uuid, device);
        CALL(cudaDeviceGetPCIBusId, bus, sizeof bus, device);
        fprintf(stderr, " %d (%s)", uuid.bytes[sizeof uuid.bytes - 1], bus);
    }
    fprintf(stderr, "\n");
    return 0;
}

static void visible_devices_are_chosen_as_the_real_driver_does(void **state) {
    static const struct {
        const char *visible, *expected;
    } cases[] = {
        {"CUDA_VISIBLE_DEVICES=0,1,2", "init 0: 0 (0000:10:00.0) 1 (0000:11:00.0) 2 (0000:12:00.0)\n"},
        {"CUDA_VISIBLE_DEVICES=2,0", "init 0: 2 (0000:12:00.0) 0 (0000:10:00.0)\n"},
        {"CUDA_VISIBLE_DEVICES=1", "init 0: 1 (0000:11:00.0)\n"},
        {"CUDA_VISIBLE_DEVICES=", "init 100:\n"},
        {"CUDA_VISIBLE_DEVICES=-1", "init 100:\n"},
        {"CUDA_VISIBLE_DEVICES=none", "init 100:\n"},
        {"CUDA_VISIBLE_DEVICES=1,3,0", "init 0: 1 (0000:11:00.0)\n"},
        {"CUDA_VISIBLE_DEVICES=1,,0", "init 0: 1 (0000:11:00.0)\n"},
        {"CUDA_VISIBLE_DEVICES=1, 0 ", "init 0: 1 (0000:11:00.0) 0 (0000:10:00.0)\n"},
        {"CUDA_VISIBLE_DEVICES=1,0,1", "init 100:\n"},
        {"CUDA_VISIBLE_DEVICES=" UUID_OF_2, "init 0: 2 (0000:12:00.0)\n"},
        {"CUDA_VISIBLE_DEVICES=" UUID_OF_2 ",0", "init 0: 2 (0000:12:00.0) 0 (0000:10:00.0)\n"},
        {"CUDA_VISIBLE_DEVICES=GPU-5369", "init 100:\n"}, /* ambiguous */
        {"CUDA_VISIBLE_DEVICES=GPU-ffff", "init 100:\n"},
    };
    char output[OUTPUT_BYTES];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *const variables[] = {"TMS_SIMULATED_DEVICES=3", "TMS_SIMULATED_VISIBLE=1", cases[i].visible, NULL};
        assert_int_equal(run_again("describe_visible", variables, output, sizeof output), 0);
        assert_string_equal(output, cases[i].expected);
    }
    /* Unless declared to be about the simulated devices, it is about others. */
    static const char *const of_others[] = {"TMS_SIMULATED_DEVICES=1", "CUDA_VISIBLE_DEVICES=5", NULL};
    assert_int_equal(run_again("describe_visible", of_others, output, sizeof output), 0);
    assert_string_equal(output, "init 0: 0 (0000:10:00.0)\n");
}

static void the_trace_goes_to_a_file(void **state) {
    char path[] = "/tmp/simulated_trace_XXXXXX", variable[64], text[OUTPUT_BYTES] = "";
    const char *const variables[] = {variable, NULL};
    int file = mkstemp(path);
    (void)state;
    assert_true(file >= 0);
    snprintf(variable, sizeof variable, "TMS_SIMULATED_TRACE=%s", path);
    assert_int_equal(run_again("leave_nothing", variables, text, sizeof text), 0);
    ssize_t length = read(file, text, sizeof text - 1);
    unlink(path);
    close(file);
    assert_true(length > 0);
    text[length] = '\0';
    assert_string_equal(text, "cuInit\ncuMemAddressReserve\ncuMemCreate\ncuMemMap\ncuMemSetAccess\ncuMemUnmap\n"
                              "cuMemRelease\ncuMemAddressFree\n");
}

static uint64_t available_now(void) {
    size_t available = 0, total = 0;
    CALL(cuMemGetInfo_v2, &available, &total);
    return total == 16 * MIB ? available : UINT64_MAX;
}

static int share(void) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    if (CALL(cuInit, 0) != CUDA_SUCCESS) return CHILD_FAILED;
    CALL(cuCtxPushCurrent_v2, retain_primary(0));
    for (int killed = 0; killed < 2; killed++) {
        holder_t holder = start_holder();
        if (available_now() != 4 * MIB) return CHILD_FAILED + 1;
        if (CALL(cuMemCreate, &handle, 6 * MIB, &properties, 0) != CUDA_ERROR_OUT_OF_MEMORY) return CHILD_FAILED + 2;
        if (CALL(cuMemCreate, &handle, 4 * MIB, &properties, 0) != CUDA_SUCCESS) return CHILD_FAILED + 3;
        if (available_now() != 0) return CHILD_FAILED + 4;
        killed ? kill_holder(&holder) : end_holder(&holder);
        CALL(cuMemRelease, handle);
        /* The whole budget, without a query of what is available first. */
        if (CALL(cuMemCreate, &handle, 16 * MIB, &properties, 0) != CUDA_SUCCESS) return CHILD_FAILED + 5;
        CALL(cuMemRelease, handle);
        if (available_now() != 16 * MIB) return CHILD_FAILED + 6;
    }
    return 0;
}

static void processes_share_a_budget(void **state) {
    char name[64], path[96], output[OUTPUT_BYTES];
    const char *const variables[] = {name, "TMS_SIMULATED_MEMORY=16MiB", NULL};
    (void)state;
    snprintf(name, sizeof name, "TMS_SIMULATED_SHARED=test_%d", (int)getpid());
    snprintf(path, sizeof path, "/dev/shm/tms_simulated_test_%d", (int)getpid());
    assert_int_equal(run_again("share", variables, output, sizeof output), 0);
    assert_string_equal(output, "");
    assert_int_not_equal(access(path, F_OK), 0); /* the last one removed the name */
}

/* The name of this test's machine in the environment, and its file. */
typedef struct machine_file {
    char variable[64], path[96];
} machine_file_t;

static machine_file_t name_machine(void) {
    machine_file_t file;
    snprintf(file.variable, sizeof file.variable, "TMS_SIMULATED_SHARED=test_%d", (int)getpid());
    snprintf(file.path, sizeof file.path, "/dev/shm/tms_simulated_test_%d", (int)getpid());
    return file;
}

/* Makes a file with `bytes` bytes of `value`. */
static int make_file(const char *path, size_t bytes, int value, mode_t mode) {
    char *contents = malloc(bytes + 1);
    int file = open(path, O_RDWR | O_CREAT | O_EXCL, mode);
    assert_non_null(contents);
    assert_true(file >= 0);
    memset(contents, value, bytes);
    assert_int_equal(write(file, contents, bytes), bytes);
    assert_int_equal(fchmod(file, mode), 0);
    free(contents);
    return file;
}

/* The size of the file of a machine. */
static size_t machine_bytes(const machine_file_t *file) {
    const char *const variables[] = {file->variable, "TMS_SIMULATED_MEMORY=16MiB", NULL};
    char output[OUTPUT_BYTES];
    assert_int_equal(run_again("measure", variables, output, sizeof output), 0);
    return strtoul(output, NULL, 10);
}

/* Prints the size of the file of this process's machine. */
static int measure(void) {
    char path[96];
    struct stat status;
    if (CALL(cuInit, 0) != CUDA_SUCCESS) return CHILD_FAILED;
    snprintf(path, sizeof path, "/dev/shm/tms_simulated_%s", getenv("TMS_SIMULATED_SHARED"));
    if (stat(path, &status) != 0) return CHILD_FAILED;
    fprintf(stderr, "%lld", (long long)status.st_size);
    return 0;
}

/* A process reports the file and works without it. Afterwards the file is removed. */
static void assert_not_shared(const machine_file_t *file, const char *reason) {
    const char *const variables[] = {file->variable, "TMS_SIMULATED_MEMORY=16MiB", NULL};
    char output[OUTPUT_BYTES], expected[OUTPUT_BYTES];
    assert_int_equal(run_again("describe", variables, output, sizeof output), 0);
    snprintf(expected, sizeof expected,
             "simulated GPU: the budget is not shared as %s: %s; set TMS_SIMULATED_SHARED to another "
             "name, or remove the file if no program uses it\ninit 0, devices 1, bytes 16777216, peers -1, reserve 0\n",
             file->path, reason);
    assert_string_equal(output, expected);
    assert_int_equal(unlink(file->path), 0);
}

static void a_file_that_is_not_a_machine_s_is_reported(void **state) {
    static const char size[] = "its size is not that of a simulated machine",
                      contents[] = "its contents are not those of a simulated machine";
    machine_file_t file = name_machine();
    size_t bytes = machine_bytes(&file);
    (void)state;
    assert_true(bytes > 1);
    close(make_file(file.path, 1, 1, 0600));
    assert_not_shared(&file, size);
    close(make_file(file.path, bytes - 1, 0, 0600));
    assert_not_shared(&file, size);
    close(make_file(file.path, 100 * bytes, 1, 0600));
    assert_not_shared(&file, size);
    close(make_file(file.path, bytes, 1, 0600));
    assert_not_shared(&file, contents);
    close(make_file(file.path, bytes, 0, 0620));
    assert_not_shared(&file, "other users can use it");
    assert_int_equal(mkfifo(file.path, 0600), 0);
    assert_not_shared(&file, "it is not a regular file");
    assert_int_equal(symlink("/dev/shm/tms_simulated_of_nobody", file.path), 0);
    assert_not_shared(&file, "Too many levels of symbolic links");
}

/* A process was killed before it initialised the file. */
static void a_file_that_nobody_initialised_is_used(void **state) {
    machine_file_t file = name_machine();
    const char *const variables[] = {file.variable, "TMS_SIMULATED_MEMORY=16MiB", NULL};
    const size_t sizes[] = {0, machine_bytes(&file)};
    char output[OUTPUT_BYTES];
    (void)state;
    for (int i = 0; i < 2; i++) {
        close(make_file(file.path, sizes[i], 0, 0600));
        assert_int_equal(run_again("share", variables, output, sizeof output), 0);
        assert_string_equal(output, "");
        assert_int_not_equal(access(file.path, F_OK), 0);
    }
}

/* The other user keeps the file locked. The system itself may refuse to open it, in a folder where everybody may make files.
 */
static void a_file_of_another_user_is_not_waited_for(void **state) {
    enum { ANOTHER_USER = 54321 };
    machine_file_t file = name_machine();
    const char *const variables[] = {file.variable, "TMS_SIMULATED_MEMORY=16MiB", NULL};
    char output[OUTPUT_BYTES];
    (void)state;
    if (geteuid() != 0) {
        print_message("skipped: only root can make a file of another user\n");
        skip();
    }
    int foreign = make_file(file.path, machine_bytes(&file), 0, 0600);
    assert_int_equal(fchown(foreign, ANOTHER_USER, (gid_t)-1), 0);
    assert_int_equal(flock(foreign, LOCK_EX), 0);
    assert_int_equal(run_again("describe", variables, output, sizeof output), 0);
    unlink(file.path);
    close(foreign);
    assert_non_null(strstr(output, "simulated GPU: the budget is not shared as "));
    assert_true(strstr(output, ": it belongs to another user; ") || strstr(output, ": Permission denied; "));
    assert_non_null(strstr(output, "init 0, devices 1"));
}

/* A relative path would lead to another folder after a change of the working directory. */
static void a_relative_trace_is_ignored(void **state) {
    static const char *const variables[] = {"TMS_SIMULATED_TRACE=relative_trace", NULL};
    char output[OUTPUT_BYTES];
    (void)state;
    assert_int_equal(run_again("leave_nothing", variables, output, sizeof output), 0);
    int absent = access("relative_trace", F_OK);
    unlink("relative_trace");
    assert_int_equal(absent, -1);
    assert_string_equal(output, "simulated GPU: TMS_SIMULATED_TRACE=relative_trace is ignored: invalid value\n");
}

int main(int count, char **arguments) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_report_lists_leaks),
        cmocka_unit_test(the_environment_configures),
        cmocka_unit_test(visible_devices_are_chosen_as_the_real_driver_does),
        cmocka_unit_test(the_trace_goes_to_a_file),
        cmocka_unit_test(processes_share_a_budget),
        cmocka_unit_test(a_file_that_is_not_a_machine_s_is_reported),
        cmocka_unit_test(a_file_that_nobody_initialised_is_used),
        cmocka_unit_test(a_file_of_another_user_is_not_waited_for),
        cmocka_unit_test(a_relative_trace_is_ignored),
    };
    static const role_t roles[] = {{"leak", leak},         {"leave_nothing", leave_nothing},
                                   {"describe", describe}, {"describe_visible", describe_visible},
                                   {"hold", hold},         {"share", share},
                                   {"measure", measure}};
    if (count > 1) return run_role(roles, sizeof roles / sizeof *roles, arguments[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
