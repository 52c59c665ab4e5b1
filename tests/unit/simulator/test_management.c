/* Guards the simulated GPU's management library (NVML): it sees the whole machine, and which processes use which
 * device. This program starts itself again in the roles that the tests need. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "support/holder_fixture.h"

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

typedef int by_index_t(unsigned, void **);
typedef int uuid_text_t(void *, char *, unsigned);

/* The bytes of a process by the management library; 0 if it is not listed. `count`: of the listed ones. */
static unsigned long long used_by(pid_t pid, unsigned *count) {
    process_info_t rows[4];
    void *device = NULL;
    by_index_t *by_index = MANAGEMENT(by_index_t, "nvmlDeviceGetHandleByIndex");
    list_t *list = MANAGEMENT(list_t, "nvmlDeviceGetComputeRunningProcesses_v3");
    *count = sizeof rows / sizeof *rows;
    if (by_index(0, &device) != NVML_SUCCESS || list(device, count, rows) != NVML_SUCCESS) return UINT64_MAX;
    for (unsigned i = 0; i < *count; i++) {
        if (rows[i].pid == (unsigned)pid && rows[i].gpu_instance == UINT32_MAX) return rows[i].used_bytes;
    }
    return 0;
}

/* The memory in use by the management library, if free and used memory make up the total of 16 MiB. */
static unsigned long long used_of_device(void) {
    unsigned long long memory[3] = {0}; /* nvmlMemory_t: total, free, used */
    void *device = NULL;
    by_index_t *by_index = MANAGEMENT(by_index_t, "nvmlDeviceGetHandleByIndex");
    memory_t *read = MANAGEMENT(memory_t, "nvmlDeviceGetMemoryInfo");
    if (by_index(0, &device) != NVML_SUCCESS || read(device, memory) != NVML_SUCCESS) return UINT64_MAX;
    if (read(device, NULL) != NVML_ERROR_INVALID_ARGUMENT || read(NULL, memory) != NVML_ERROR_INVALID_ARGUMENT)
        return UINT64_MAX;
    return memory[0] == 16 * MIB && memory[1] + memory[2] == memory[0] ? memory[2] : UINT64_MAX;
}

/* Whether this process is listed exactly while it has a context, of either kind. It has no memory. */
static bool listed_by_contexts(void) {
    CUcontext context = NULL;
    unsigned count = 0;
    if (CALL(cuDevicePrimaryCtxRetain, &context, 0) != CUDA_SUCCESS || used_by(getpid(), &count) != 0) return false;
    if (count != 1 || CALL(cuCtxCreate_v2, &context, 0, 0) != CUDA_SUCCESS) return false;
    if (CALL(cuDevicePrimaryCtxRelease_v2, 0) != CUDA_SUCCESS || used_by(getpid(), &count) != 0) return false;
    if (count != 1 || CALL(cuCtxDestroy_v2, context) != CUDA_SUCCESS) return false;
    return used_by(getpid(), &count) == 0 && count == 0;
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
    kill_holder(&holder);
    if (used_by(holder.pid, &count) != 0 || count != 1) return CHILD_FAILED + 5;
    CALL(cuMemRelease, handle);
    if (used_by(getpid(), &count) != 0 || count != 0) return CHILD_FAILED + 6;
    return listed_by_contexts() ? 0 : CHILD_FAILED + 7;
}

/* Prints the UUID of device 1 by NVML, by the driver, and by the name's prefix. */
static int name_device(void) {
    char text[64] = "";
    void *device = NULL, *same = NULL;
    CUuuid uuid;
    if (MANAGEMENT(by_index_t, "nvmlDeviceGetHandleByIndex")(1, &device) != NVML_SUCCESS) return CHILD_FAILED;
    if (MANAGEMENT(uuid_text_t, "nvmlDeviceGetUUID")(device, text, sizeof text) != NVML_SUCCESS) return CHILD_FAILED;
    if (MANAGEMENT(by_uuid_t, "nvmlDeviceGetHandleByUUID")(text, &same) != NVML_SUCCESS) return CHILD_FAILED;
    if (same != device || CALL(cuInit, 0) != CUDA_SUCCESS) return CHILD_FAILED;
    if (CALL(cuDeviceGetUuid_v2, &uuid, 1) != CUDA_SUCCESS) return CHILD_FAILED;
    fprintf(stderr, "%s ", text);
    for (size_t i = 0; i < sizeof uuid.bytes; i++) fprintf(stderr, "%02x", (unsigned char)uuid.bytes[i]);
    return 0;
}

static void name_device_of(const char *machine, char *output) {
    char name[64];
    const char *const variables[] = {name, "TMS_SIMULATED_DEVICES=2", NULL};
    snprintf(name, sizeof name, "TMS_SIMULATED_SHARED=test_%s_%d", machine, (int)getpid());
    assert_int_equal(run_again("name_device", variables, output, OUTPUT_BYTES), 0);
}

static void each_machine_has_uuids_of_its_own(void **state) {
    char first[OUTPUT_BYTES], again[OUTPUT_BYTES], other[OUTPUT_BYTES], digits[OUTPUT_BYTES];
    size_t count = 0;
    (void)state;
    name_device_of("first", first);
    name_device_of("first", again);
    name_device_of("other", other);
    assert_string_equal(first, again);
    assert_string_not_equal(first, other);
    for (const char *at = first + strlen("GPU-"); *at != ' '; at++) {
        if (*at != '-') digits[count++] = *at;
    }
    digits[count] = '\0';
    assert_string_equal(digits, strchr(first, ' ') + 1); /* NVML and the driver agree */
}

typedef int number_t(void *, int, unsigned *);
typedef int power_t(void *, unsigned *);

static void clocks_power_and_temperature_are_constants(void **state) {
    void *device = NULL;
    unsigned number = 0, rates[2] = {1, 1};
    number_t *clock = MANAGEMENT(number_t, "nvmlDeviceGetClockInfo");
    number_t *temperature = MANAGEMENT(number_t, "nvmlDeviceGetTemperature");
    power_t *power = MANAGEMENT(power_t, "nvmlDeviceGetPowerUsage");
    power_t *utilization = MANAGEMENT(power_t, "nvmlDeviceGetUtilizationRates");
    (void)state;
    assert_int_equal(MANAGEMENT(by_index_t, "nvmlDeviceGetHandleByIndex")(0, &device), NVML_SUCCESS);
    assert_int_equal(clock(device, 1, &number), NVML_SUCCESS);
    assert_int_equal(number, 1980);
    assert_int_equal(clock(device, 2, &number), NVML_SUCCESS);
    assert_int_equal(number, 2619);
    assert_int_equal(clock(device, 4, &number), NVML_ERROR_INVALID_ARGUMENT);
    assert_int_equal(temperature(device, 0, &number), NVML_SUCCESS);
    assert_int_equal(number, 25);
    assert_int_equal(power(device, &number), NVML_SUCCESS);
    assert_int_equal(number, 70000);
    assert_int_equal(power(NULL, &number), NVML_ERROR_INVALID_ARGUMENT);
    assert_int_equal(utilization(device, rates), NVML_SUCCESS);
    assert_int_equal(rates[0] + rates[1], 0);
}

static void the_management_library_lists_the_processes_with_memory_or_a_context(void **state) {
    char name[64], output[OUTPUT_BYTES];
    const char *const variables[] = {name, "TMS_SIMULATED_MEMORY=16MiB", NULL};
    (void)state;
    snprintf(name, sizeof name, "TMS_SIMULATED_SHARED=test_list_%d", (int)getpid());
    assert_int_equal(run_again("list_processes", variables, output, sizeof output), 0);
    assert_string_equal(output, "");
}

/* A process that shares its budget with no other: the sizes of arrays, and both layouts. */
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
    return listed_by_contexts() ? 0 : CHILD_FAILED + 8;
}

static void a_process_is_listed_on_the_devices_that_it_uses(void **state) {
    static const char *const variables[] = {"TMS_SIMULATED_DEVICES=3", NULL};
    char output[OUTPUT_BYTES];
    (void)state;
    assert_int_equal(run_again("list_alone", variables, output, sizeof output), 0);
    assert_string_equal(output, "");
}

int main(int count, char **arguments) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_management_library_sees_the_whole_machine),
        cmocka_unit_test(the_management_library_lists_the_processes_with_memory_or_a_context),
        cmocka_unit_test(a_process_is_listed_on_the_devices_that_it_uses),
        cmocka_unit_test(each_machine_has_uuids_of_its_own),
        cmocka_unit_test(clocks_power_and_temperature_are_constants),
    };
    static const role_t roles[] = {{"describe_machine", describe_machine},
                                   {"hold", hold},
                                   {"list_processes", list_processes},
                                   {"list_alone", list_alone},
                                   {"name_device", name_device}};
    if (count > 1) return run_role(roles, sizeof roles / sizeof *roles, arguments[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
