/* Scenarios of test_handles.py: memory that PyTorch's allocator maps itself. ALLOCATOR and OTHER name two libraries made of
 * handles_library.c; the first has the name of the library with the allocator. */
#include <cuda.h>

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

enum { PIECES = 4, FABRIC = 8 };
#define DESCRIPTOR  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
#define PIECE_BYTES ((size_t)2 << 20)

typedef struct library {
    void *(*find)(const char *symbol, bool by_version);
    CUresult (*create)(void *create, CUmemGenericAllocationHandle *handle, size_t bytes, int types);
} library_t;

/* The table of functions that PyTorch's libraries share. */
static struct {
    void *create;
    __typeof__(&cuMemRelease) release;
    __typeof__(&cuMemRetainAllocationHandle) retain;
    __typeof__(&cuMemMap) map;
    __typeof__(&cuMemUnmap) unmap;
    __typeof__(&cuMemSetAccess) set_access;
    __typeof__(&cuMemAddressReserve) reserve;
    __typeof__(&cuMemAddressFree) free_addresses;
    __typeof__(&cuMemExportToShareableHandle) export;
    __typeof__(&cuMemGetAllocationPropertiesFromHandle) get_properties;
} table;

static CUdeviceptr base;
static CUmemGenericAllocationHandle handles[PIECES];

static library_t open_library(const char *variable) {
    library_t library;
    void *handle = dlopen(getenv(variable), RTLD_NOW | RTLD_LOCAL);
    if (!handle) fprintf(stderr, "%s\n", dlerror());
    CHECK(handle != NULL);
    library.find = (__typeof__(library.find))dlsym(handle, "library_find");
    library.create = (__typeof__(library.create))dlsym(handle, "library_create");
    CHECK(library.find && library.create);
    return library;
}

static library_t start(bool by_version) {
    library_t allocator = open_library("ALLOCATOR");
    EQUAL(cudaFree(NULL), SUCCESS); /* makes a context */
    table.create = allocator.find("cuMemCreate", by_version);
    table.release = (__typeof__(table.release))allocator.find("cuMemRelease", by_version);
    table.retain = (__typeof__(table.retain))allocator.find("cuMemRetainAllocationHandle", by_version);
    table.map = (__typeof__(table.map))allocator.find("cuMemMap", by_version);
    table.unmap = (__typeof__(table.unmap))allocator.find("cuMemUnmap", by_version);
    table.set_access = (__typeof__(table.set_access))allocator.find("cuMemSetAccess", by_version);
    table.reserve = (__typeof__(table.reserve))allocator.find("cuMemAddressReserve", by_version);
    table.free_addresses = (__typeof__(table.free_addresses))allocator.find("cuMemAddressFree", by_version);
    table.export = (__typeof__(table.export))allocator.find("cuMemExportToShareableHandle", by_version);
    table.get_properties =
        (__typeof__(table.get_properties))allocator.find("cuMemGetAllocationPropertiesFromHandle", by_version);
    EQUAL(table.reserve(&base, PIECES * PIECE_BYTES, 0, 0, 0), CUDA_SUCCESS);
    return allocator;
}

static void *at(int piece) { return (void *)(uintptr_t)(base + (size_t)piece * PIECE_BYTES); }

static bool is_managed_piece(int piece) {
    tms_segment_info_t row;
    return API()->find((uintptr_t)at(piece), 1, &row) == TMS_OK;
}

static void set_access(int first, int count) {
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    EQUAL(table.set_access((uintptr_t)at(first), (size_t)count * PIECE_BYTES, &access, 1), CUDA_SUCCESS);
}

static void map(library_t library, int piece) {
    EQUAL(library.create(table.create, &handles[piece], PIECE_BYTES, DESCRIPTOR), CUDA_SUCCESS);
    EQUAL(table.map((uintptr_t)at(piece), PIECE_BYTES, 0, handles[piece], 0), CUDA_SUCCESS);
}

static void map_all(library_t library) {
    for (int piece = 0; piece < PIECES; piece++) map(library, piece);
    set_access(0, PIECES);
    for (int piece = 0; piece < PIECES; piece++) fill(at(piece), PIECE_BYTES, (unsigned)piece);
}

static void unmap(int piece) {
    EQUAL(table.unmap((uintptr_t)at(piece), PIECE_BYTES), CUDA_SUCCESS);
    EQUAL(table.release(handles[piece]), CUDA_SUCCESS);
}

static void unmap_all(void) {
    for (int piece = 0; piece < PIECES; piece++) unmap(piece);
    EQUAL(table.free_addresses(base, PIECES * PIECE_BYTES), CUDA_SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
    EQUAL(usage_of(0).mappings, 0);
    EQUAL(usage_of(0).reservations, 0);
    EQUAL(counters().allocations, 0);
}

static void cycle(size_t bytes) {
    const uint64_t before = usage_of(0).physical_bytes;
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, before - bytes);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, before);
}

static void managed(bool by_version) {
    map_all(start(by_version));
    for (int piece = 0; piece < PIECES; piece++) CHECK(is_managed_piece(piece));
    EQUAL(counters().allocations, PIECES);
    cycle(PIECES * PIECE_BYTES);
    for (int piece = 0; piece < PIECES; piece++) CHECK(is_filled(at(piece), PIECE_BYTES, (unsigned)piece));
    unmap_all();
}

static void by_version(void) { managed(true); }
static void by_name(void) { managed(false); }

/* PyTorch's symmetric memory, in another library, uses the allocator's table. */
static void another_library_uses_the_table(void) {
    (void)start(true);
    map_all(open_library("OTHER"));
    for (int piece = 0; piece < PIECES; piece++) CHECK(!is_managed_piece(piece));
    cycle(0);
    for (int piece = 0; piece < PIECES; piece++) CHECK(is_filled(at(piece), PIECE_BYTES, (unsigned)piece));
    unmap_all();
}

/* What another library looks up itself is the driver's own. */
static void another_library_looks_up(void) {
    library_t allocator = start(true), other = open_library("OTHER");
    CHECK(other.find("cuMemCreate", true) != table.create);
    CHECK(other.find("cuMemMap", false) != (void *)table.map);
    CHECK(allocator.find("cuMemCreate", false) == table.create);
    EQUAL(table.free_addresses(base, PIECES * PIECE_BYTES), CUDA_SUCCESS);
}

/* A thread whose region is switched off gets ordinary memory, beside managed memory in one range. */
static void mixed_range(void) {
    library_t allocator = start(true);
    for (int piece = 0; piece < PIECES; piece++) {
        TMS(tms_set_interesting_region)(piece % 2 == 0);
        map(allocator, piece);
    }
    TMS(tms_set_interesting_region)(true);
    set_access(0, PIECES);
    for (int piece = 0; piece < PIECES; piece++) {
        EQUAL(is_managed_piece(piece), piece % 2 == 0);
        fill(at(piece), PIECE_BYTES, (unsigned)piece);
    }
    cycle(PIECES / 2 * PIECE_BYTES);
    for (int piece = 0; piece < PIECES; piece++) CHECK(is_filled(at(piece), PIECE_BYTES, (unsigned)piece));
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    set_access(0, PIECES); /* paused memory gets its access at the resume */
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    unmap_all();
}

/* Functions that take a handle take both kinds. */
static void handles_of_both_kinds(void) {
    library_t allocator = start(true);
    CUmemAllocationProp properties = {0};
    CUmemGenericAllocationHandle again = 0;
    int descriptor = -1;
    map_all(allocator);
    TMS(tms_set_interesting_region)(false);
    unmap(1);
    map(allocator, 1);
    set_access(1, 1);
    CHECK(is_managed_piece(0) && !is_managed_piece(1));
    for (int piece = 0; piece < 2; piece++) {
        EQUAL(table.get_properties(&properties, handles[piece]), CUDA_SUCCESS);
        EQUAL(properties.location.id, 0);
        EQUAL(table.export(&descriptor, handles[piece], DESCRIPTOR, 0), CUDA_SUCCESS);
        CHECK(close(descriptor) == 0);
        EQUAL(table.retain(&again, at(piece)), CUDA_SUCCESS);
        if (piece == 0) EQUAL(again, handles[piece]);
        EQUAL(table.release(again), CUDA_SUCCESS);
    }
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    CHECK(table.get_properties(&properties, handles[0]) != CUDA_SUCCESS);
    EQUAL(table.get_properties(&properties, handles[1]), CUDA_SUCCESS);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    EQUAL(table.get_properties(&properties, handles[0]), CUDA_SUCCESS);
    unmap_all();
}

/* PyTorch asks for fabric handles first, and would keep to them. */
static void fabric_handles(void) {
    library_t allocator = start(true);
    CUmemGenericAllocationHandle handle;
    EQUAL(allocator.create(table.create, &handle, PIECE_BYTES, FABRIC), CUDA_ERROR_NOT_PERMITTED);
    map_all(allocator);
    unmap_all();
}

static void too_little_memory(void) {
    library_t allocator = start(true);
    CUmemGenericAllocationHandle handle;
    tms_sim_fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    EQUAL(allocator.create(table.create, &handle, PIECE_BYTES, DESCRIPTOR), CUDA_ERROR_OUT_OF_MEMORY);
    map_all(allocator);
    unmap_all();
}

/* The memory belongs to the parent. */
static void a_forked_child(void) {
    int status = -1;
    map_all(start(true));
    const pid_t child = fork();
    if (child == 0) {
        CHECK(table.unmap((uintptr_t)at(0), PIECE_BYTES) == CUDA_SUCCESS);
        CHECK(table.release(handles[0]) == CUDA_SUCCESS);
        _exit(tms_sim_calls_in_child() == 0 ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child);
    EQUAL(status, 0);
    cycle(PIECES * PIECE_BYTES);
    unmap_all();
}

/* ---- a stand-in for Python's interpreter, which is found in the global scope ---- */

static int initialized, saves, restores;
static char held;

int Py_IsInitialized(void) { return initialized; }
int Py_AddPendingCall(int (*call)(void *), void *argument) { return call && argument ? 0 : -1; }
int PyGILState_Ensure(void) { return 0; }
void PyGILState_Release(int before) { (void)before; }
void *PyImport_ImportModule(const char *name) { return name ? NULL : &held; }
void *PyObject_CallMethod(void *object, const char *name, const char *format, ...) { return name && format ? NULL : object; }
void PyErr_WriteUnraisable(void *object) { (void)object; }
void Py_DecRef(void *object) { (void)object; }
int PyGILState_Check(void) { return 1; }

/* The resume needs the GIL before it ends. */
void *PyEval_SaveThread(void) {
    saves++;
    tms_sim_set_bandwidth(0);
    return &held;
}

void PyEval_RestoreThread(void *state) {
    CHECK(state == &held);
    restores++;
}

static void *resume_in_the_background(void *unused) {
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    return unused;
}

/* A resume is filling the memory that PyTorch maps again, and another thread must run before it ends. */
static void a_map_waits_without_the_gil(void) {
    library_t allocator = start(true);
    pthread_t thread;
    map_all(allocator);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    tms_sim_set_bandwidth(1); /* the copies do not end */
    EQUAL(pthread_create(&thread, NULL, resume_in_the_background, NULL), 0);
    tms_sim_wait_until_synchronizing();
    unmap(1);
    initialized = 1;
    map(allocator, 1);
    initialized = 0;
    EQUAL(saves, 1);
    EQUAL(restores, 1);
    EQUAL(pthread_join(thread, NULL), 0);
    for (int piece = 0; piece < PIECES; piece++) CHECK(piece == 1 || is_filled(at(piece), PIECE_BYTES, (unsigned)piece));
    unmap_all();
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } scenarios[] = {
        {"by_version", by_version},
        {"by_name", by_name},
        {"another_library_uses_the_table", another_library_uses_the_table},
        {"another_library_looks_up", another_library_looks_up},
        {"mixed_range", mixed_range},
        {"handles_of_both_kinds", handles_of_both_kinds},
        {"fabric_handles", fabric_handles},
        {"too_little_memory", too_little_memory},
        {"a_forked_child", a_forked_child},
        {"a_map_waits_without_the_gil", a_map_waits_without_the_gil},
    };
    for (size_t i = 0; argc == 2 && i < sizeof scenarios / sizeof *scenarios; i++) {
        if (strcmp(argv[1], scenarios[i].name) != 0) continue;
        scenarios[i].run();
        printf("done\n");
        return 0;
    }
    return 2;
}
