/* Guards the simulated GPU in whole processes: its environment, its report at exit, and budgets that processes share. This
 * program starts itself again in the roles that the tests need. */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simulated_cuda.h"

enum { OUTPUT_BYTES = 4096, CHILD_FAILED = 3 };

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
    assert_string_equal(output, "simulated GPU: TMS_SIMULATED_DEVICES=9 is ignored: invalid value\n"
                                "simulated GPU: TMS_SIMULATED_MEMORY=1 GB is ignored: invalid value\n"
                                "simulated GPU: TMS_SIMULATED_PEERS=yes is ignored: invalid value\n"
                                "simulated GPU: TMS_SIMULATED_FAULT=cuInit:x is ignored: invalid value\n"
                                "simulated GPU: TMS_SIMULATED_FAULT=cuNothing:0:1:2 is ignored: invalid value\n"
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

/* The UUID of device 2, as nvidia-smi would print it. */
#define UUID_OF_0 "GPU-53696d75-6c61-7465-6420-475055000000"
#define UUID_OF_2 "GPU-53696d75-6c61-7465-6420-475055000002"

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

/* The management library's view of the machine; a query does not use a device, so the process may still fork. */
static int describe_machine(void) {
    void *simulator = dlopen(getenv("TMS_CUDA_DRIVER"), RTLD_NOW);
    int (*count_devices)(unsigned *) = (int (*)(unsigned *))(uintptr_t)dlsym(simulator, "nvmlDeviceGetCount_v2");
    int (*by_bus)(const char *, void **) =
        (int (*)(const char *, void **))(uintptr_t)dlsym(simulator, "nvmlDeviceGetHandleByPciBusId_v2");
    int (*by_index)(unsigned, void **) =
        (int (*)(unsigned, void **))(uintptr_t)dlsym(simulator, "nvmlDeviceGetHandleByIndex");
    int (*get_uuid)(void *, char *, unsigned) =
        (int (*)(void *, char *, unsigned))(uintptr_t)dlsym(simulator, "nvmlDeviceGetUUID");
    unsigned count = 0;
    void *device = NULL, *same = NULL;
    char text[64] = "";
    int wrong = by_bus("00000000:13:00.0", &device), far = by_index(3, &device);
    count_devices(&count);
    by_bus("00000000:12:00.0", &device);
    by_index(2, &same);
    get_uuid(device, text, sizeof text);
    fprintf(stderr, "%u devices, %s %d, %d %d %d\n", count, text, device == same, wrong, far, get_uuid(device, text, 8));
    pid_t child = fork();
    if (child == 0) _exit(CALL(cuInit, 0) == CUDA_SUCCESS ? 0 : CHILD_FAILED);
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0 ? 0 : CHILD_FAILED;
}

static void the_management_library_sees_the_whole_machine(void **state) {
    static const char *const variables[] = {"TMS_SIMULATED_DEVICES=3", "TMS_SIMULATED_VISIBLE=1", "CUDA_VISIBLE_DEVICES=1",
                                            NULL};
    char output[OUTPUT_BYTES];
    (void)state;
    assert_int_equal(run_again("describe_machine", variables, output, sizeof output), 0);
    assert_string_equal(output, "3 devices, " UUID_OF_2 " 1, 6 2 7\n");
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

/* One of two processes with the same budget of 16 MiB. It starts another, which holds some of it until its input ends, or
 * until it is killed. */
typedef struct holder {
    pid_t pid;
    int input, output;
} holder_t;

static void become_holder(const int *down, const int *up) {
    char *const arguments[] = {"simulated", "hold", NULL};
    dup2(down[0], STDIN_FILENO);
    dup2(up[1], STDOUT_FILENO);
    close(down[1]);
    close(up[0]);
    execv("/proc/self/exe", arguments);
    _exit(CHILD_FAILED);
}

static holder_t start_holder(void) {
    int down[2], up[2];
    holder_t holder;
    char byte = 0;
    if (pipe(down) != 0 || pipe(up) != 0) _exit(CHILD_FAILED);
    holder.pid = fork();
    if (holder.pid == 0) become_holder(down, up);
    close(down[0]);
    close(up[1]);
    holder.input = down[1];
    holder.output = up[0];
    if (read(holder.output, &byte, 1) != 1 || byte != 'h') _exit(CHILD_FAILED);
    return holder;
}

static void end_holder(const holder_t *holder, bool killed) {
    int status = 0;
    if (killed) kill(holder->pid, SIGKILL);
    close(holder->input);
    close(holder->output);
    waitpid(holder->pid, &status, 0);
}

static int hold(void) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    char byte = 'h';
    if (CALL(cuInit, 0) != CUDA_SUCCESS || CALL(cuMemCreate, &handle, 12 * MIB, &properties, 0) != CUDA_SUCCESS) byte = 'x';
    if (write(STDOUT_FILENO, &byte, 1) != 1) return CHILD_FAILED;
    return read(STDIN_FILENO, &byte, 1) == 0 ? 0 : CHILD_FAILED;
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
        end_holder(&holder, killed);
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

/* What nvmlDeviceGetComputeRunningProcesses_v3 fills. */
typedef struct process_info {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
} process_info_t;

enum { NVML_SUCCESS = 0, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_FOUND = 6, NVML_ERROR_INSUFFICIENT_SIZE = 7 };

typedef int list_t(void *, unsigned *, void *);
typedef int by_uuid_t(const char *, void **);
typedef int memory_t(void *, unsigned long long *);

/* A function of the management library. */
#define MANAGEMENT(type, name) ((type *)(uintptr_t)dlsym(dlopen(getenv("TMS_CUDA_DRIVER"), RTLD_NOW), name))

/* The bytes of a process by the management library; 0 if it is not listed. `count`: of the listed ones. */
static unsigned long long used_by(pid_t pid, unsigned *count) {
    process_info_t rows[4];
    void *device = NULL;
    by_uuid_t *by_uuid = MANAGEMENT(by_uuid_t, "nvmlDeviceGetHandleByUUID");
    list_t *list = MANAGEMENT(list_t, "nvmlDeviceGetComputeRunningProcesses_v3");
    *count = sizeof rows / sizeof *rows;
    if (by_uuid(UUID_OF_0, &device) != NVML_SUCCESS || list(device, count, rows) != NVML_SUCCESS) return UINT64_MAX;
    for (unsigned i = 0; i < *count; i++) {
        if (rows[i].pid == (unsigned)pid && rows[i].gpu_instance == UINT32_MAX) return rows[i].used_bytes;
    }
    return 0;
}

/* The memory in use by the management library, if free and used memory make up the total of 16 MiB. */
static unsigned long long used_of_device(void) {
    unsigned long long memory[3] = {0}; /* nvmlMemory_t: total, free, used */
    void *device = NULL;
    by_uuid_t *by_uuid = MANAGEMENT(by_uuid_t, "nvmlDeviceGetHandleByUUID");
    memory_t *read = MANAGEMENT(memory_t, "nvmlDeviceGetMemoryInfo");
    if (by_uuid(UUID_OF_0, &device) != NVML_SUCCESS || read(device, memory) != NVML_SUCCESS) return UINT64_MAX;
    if (read(device, NULL) != NVML_ERROR_INVALID_ARGUMENT || read(NULL, memory) != NVML_ERROR_INVALID_ARGUMENT)
        return UINT64_MAX;
    return memory[0] == 16 * MIB && memory[1] + memory[2] == memory[0] ? memory[2] : UINT64_MAX;
}

/* Asks first without CUDA, then with memory of its own. */
static int list_processes(void) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    unsigned count = 0;
    if (used_by(getpid(), &count) != 0 || count != 0 || used_of_device() != 0) return CHILD_FAILED;
    holder_t holder = start_holder();
    if (used_by(holder.pid, &count) != 12 * MIB || count != 1) return CHILD_FAILED + 1;
    if (CALL(cuInit, 0) != CUDA_SUCCESS || CALL(cuMemCreate, &handle, 2 * MIB, &properties, 0) != CUDA_SUCCESS)
        return CHILD_FAILED + 2;
    if (used_by(getpid(), &count) != 2 * MIB || count != 2) return CHILD_FAILED + 3;
    if (used_by(holder.pid, &count) != 12 * MIB || used_of_device() != 14 * MIB) return CHILD_FAILED + 4;
    end_holder(&holder, true);
    if (used_by(holder.pid, &count) != 0 || count != 1) return CHILD_FAILED + 5;
    CALL(cuMemRelease, handle);
    return used_by(getpid(), &count) == 0 && count == 0 ? 0 : CHILD_FAILED + 6;
}

static void the_management_library_lists_the_processes_with_memory(void **state) {
    char name[64], output[OUTPUT_BYTES];
    const char *const variables[] = {name, "TMS_SIMULATED_MEMORY=16MiB", NULL};
    (void)state;
    snprintf(name, sizeof name, "TMS_SIMULATED_SHARED=test_list_%d", (int)getpid());
    assert_int_equal(run_again("list_processes", variables, output, sizeof output), 0);
    assert_string_equal(output, "");
}

/* A process that shares its budget with nobody: the sizes of arrays, and both layouts. */
static int list_alone(void) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    void *device = NULL, *other = NULL;
    process_info_t row = {0};
    unsigned long long first[2] = {0}; /* nvmlProcessInfo_v1_t: the pid, the bytes */
    unsigned count = 0;
    by_uuid_t *by_uuid = MANAGEMENT(by_uuid_t, "nvmlDeviceGetHandleByUUID");
    list_t *list = MANAGEMENT(list_t, "nvmlDeviceGetComputeRunningProcesses_v2");
    list_t *list_v1 = MANAGEMENT(list_t, "nvmlDeviceGetComputeRunningProcesses");
    if (by_uuid(UUID_OF_0, &device) != NVML_SUCCESS || by_uuid(UUID_OF_2, &other) != NVML_SUCCESS) return CHILD_FAILED;
    if (by_uuid("GPU-0", &device) != NVML_ERROR_NOT_FOUND) return CHILD_FAILED;
    if (CALL(cuInit, 0) != CUDA_SUCCESS || CALL(cuMemCreate, &handle, 2 * MIB, &properties, 0) != CUDA_SUCCESS)
        return CHILD_FAILED + 1;
    if (list(device, &count, NULL) != NVML_ERROR_INSUFFICIENT_SIZE || count != 1) return CHILD_FAILED + 2;
    if (list(device, &count, NULL) != NVML_ERROR_INVALID_ARGUMENT) return CHILD_FAILED + 3;
    if (list(device, &count, &row) != NVML_SUCCESS || row.pid != (unsigned)getpid() || row.used_bytes != 2 * MIB)
        return CHILD_FAILED + 4;
    if (list_v1(device, &count, first) != NVML_SUCCESS || first[0] != row.pid || first[1] != 2 * MIB)
        return CHILD_FAILED + 5;
    if (list(other, &count, &row) != NVML_SUCCESS || count != 0) return CHILD_FAILED + 6;
    if (list(NULL, &count, &row) != NVML_ERROR_INVALID_ARGUMENT || list(device, NULL, &row) != NVML_ERROR_INVALID_ARGUMENT)
        return CHILD_FAILED + 7;
    CALL(cuMemRelease, handle);
    return 0;
}

static void a_process_is_listed_on_the_devices_where_it_has_memory(void **state) {
    static const char *const variables[] = {"TMS_SIMULATED_DEVICES=3", NULL};
    char output[OUTPUT_BYTES];
    (void)state;
    assert_int_equal(run_again("list_alone", variables, output, sizeof output), 0);
    assert_string_equal(output, "");
}

static int run_role(const char *name) {
    static const struct {
        const char *name;
        int (*run)(void);
    } roles[] = {{"leak", leak},
                 {"leave_nothing", leave_nothing},
                 {"describe", describe},
                 {"describe_visible", describe_visible},
                 {"describe_machine", describe_machine},
                 {"hold", hold},
                 {"list_alone", list_alone},
                 {"list_processes", list_processes},
                 {"share", share}};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        if (strcmp(roles[i].name, name) == 0) return roles[i].run();
    }
    return CHILD_FAILED;
}

int main(int count, char **arguments) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_report_lists_leaks),
        cmocka_unit_test(the_environment_configures),
        cmocka_unit_test(visible_devices_are_chosen_as_the_real_driver_does),
        cmocka_unit_test(the_management_library_sees_the_whole_machine),
        cmocka_unit_test(the_management_library_lists_the_processes_with_memory),
        cmocka_unit_test(a_process_is_listed_on_the_devices_where_it_has_memory),
        cmocka_unit_test(the_trace_goes_to_a_file),
        cmocka_unit_test(processes_share_a_budget),
    };
    if (count > 1) return run_role(arguments[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
