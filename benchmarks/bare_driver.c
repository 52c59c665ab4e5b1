/* The driver calls alone, in plain loops: the limit that pauses and resumes are compared with.
 *
 * limits.py compiles this file with any C compiler when a benchmark runs, and calls each loop through ctypes. There is one
 * set of allocations at a time. One thread makes all calls; several threads prefault new host memory. Functions return a
 * CUresult, or -1 if something other than the driver failed. The file declares what it needs of cuda.h, because it is
 * compiled on machines that may have no such header. The driver's ABI does not change. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
enum { FAILED = -1, NANOSECONDS_PER_SECOND = 1000000000 };

typedef int CUresult;
typedef unsigned long long CUdeviceptr, CUhandle;
typedef struct CUlocation {
    int type, id;
} CUlocation;
typedef struct CUproperties {
    int type, requested_handle_types;
    CUlocation location;
    void *win32;
    struct {
        unsigned char compression, rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} CUproperties;
typedef struct CUaccess {
    CUlocation location;
    int flags;
} CUaccess;
enum {
    CUDA_SUCCESS = 0,
    ALLOCATION_PINNED = 1,
    LOCATION_DEVICE = 1,
    ACCESS_READ_WRITE = 3,
    HANDLE_TYPE_DESCRIPTOR = 1,
    ATTRIBUTE_DESCRIPTORS = 103,
    ATTRIBUTE_RDMA = 110,
    NON_BLOCKING = 1,
    REGISTER_PORTABLE = 1
};

/* Name in the library, member, parameters. */
#define CALLS(X)                                                                                                            \
    X("cuInit", init, (unsigned))                                                                                           \
    X("cuDeviceGet", device_get, (int *, int))                                                                              \
    X("cuDeviceGetAttribute", device_get_attribute, (int *, int, int))                                                      \
    X("cuDevicePrimaryCtxRetain", context_retain, (void **, int))                                                           \
    X("cuCtxSetCurrent", context_set_current, (void *))                                                                     \
    X("cuMemAddressReserve", reserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                     \
    X("cuMemAddressFree", unreserve, (CUdeviceptr, size_t))                                                                 \
    X("cuMemCreate", create, (CUhandle *, size_t, const CUproperties *, unsigned long long))                                \
    X("cuMemRelease", release, (CUhandle))                                                                                  \
    X("cuMemMap", map, (CUdeviceptr, size_t, size_t, CUhandle, unsigned long long))                                         \
    X("cuMemUnmap", unmap, (CUdeviceptr, size_t))                                                                           \
    X("cuMemSetAccess", set_access, (CUdeviceptr, size_t, const CUaccess *, size_t))                                        \
    X("cuMemHostRegister_v2", lock_host, (void *, size_t, unsigned))                                                        \
    X("cuMemHostUnregister", unlock_host, (void *))                                                                         \
    X("cuStreamCreate", stream_create, (void **, unsigned))                                                                 \
    X("cuStreamSynchronize", stream_synchronize, (void *))                                                                  \
    X("cuMemcpyDtoHAsync_v2", copy_out, (void *, CUdeviceptr, size_t, void *))                                              \
    X("cuMemcpyHtoDAsync_v2", copy_back, (CUdeviceptr, const void *, size_t, void *))

static struct bare {
#define MEMBER(name, member, parameters) CUresult(*member) parameters;
    CALLS(MEMBER)
#undef MEMBER
    CUproperties properties;
    CUaccess access;
    size_t count, bytes, last_bytes; /* each range but the last has `bytes`; the last one has `last_bytes` */
    CUdeviceptr *address;
    CUhandle *handle;
    void *stream;
} bare;

/* Loads the driver, makes the device's primary context current, and sets up properties like those of the library. */
EXPORT int bare_open(const char *driver, int ordinal) {
    void *library = dlopen(driver, RTLD_NOW);
    if (library == NULL) return FAILED;
#define RESOLVE(name, member, parameters)                                                                                   \
    *(void **)&bare.member = dlsym(library, name);                                                                          \
    if (bare.member == NULL) return FAILED;
    CALLS(RESOLVE)
#undef RESOLVE
    int device, rdma = 0, descriptors = 0;
    void *context;
    CUresult result = bare.init(0);
    if (result == CUDA_SUCCESS) result = bare.device_get(&device, ordinal);
    if (result == CUDA_SUCCESS) result = bare.context_retain(&context, device);
    if (result == CUDA_SUCCESS) result = bare.context_set_current(context);
    if (result == CUDA_SUCCESS) result = bare.device_get_attribute(&rdma, ATTRIBUTE_RDMA, device);
    if (result == CUDA_SUCCESS) result = bare.device_get_attribute(&descriptors, ATTRIBUTE_DESCRIPTORS, device);
    if (result == CUDA_SUCCESS && bare.stream == NULL) result = bare.stream_create(&bare.stream, NON_BLOCKING);
    bare.properties = (CUproperties){.type = ALLOCATION_PINNED, .location = {.type = LOCATION_DEVICE, .id = ordinal}};
    bare.properties.flags.rdma_capable = (unsigned char)(rdma != 0);
    if (descriptors) bare.properties.requested_handle_types = HANDLE_TYPE_DESCRIPTOR;
    bare.access = (CUaccess){.location = bare.properties.location, .flags = ACCESS_READ_WRITE};
    return result;
}

static size_t bytes_of(size_t i) { return i + 1 == bare.count ? bare.last_bytes : bare.bytes; }

static CUresult resume_one(size_t i) {
    size_t bytes = bytes_of(i);
    CUresult result = bare.create(&bare.handle[i], bytes, &bare.properties, 0);
    if (result == CUDA_SUCCESS) result = bare.map(bare.address[i], bytes, 0, bare.handle[i], 0);
    return result == CUDA_SUCCESS ? bare.set_access(bare.address[i], bytes, &bare.access, 1) : result;
}

/* A resume has to make these calls. */
EXPORT int bare_resume(void) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < bare.count && result == CUDA_SUCCESS; i++) result = resume_one(i);
    return result;
}

/* A pause has to make these calls, on an idle device. */
EXPORT int bare_pause(void) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < bare.count && result == CUDA_SUCCESS; i++) {
        result = bare.unmap(bare.address[i], bytes_of(i));
        if (result == CUDA_SUCCESS) result = bare.release(bare.handle[i]);
    }
    return result;
}

/* This resumes with contents, which lie one behind the other in pinned memory: each is copied while the next ones get their
 * memory. */
EXPORT int bare_resume_with_contents(const char *host) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < bare.count && result == CUDA_SUCCESS; i++) {
        result = resume_one(i);
        if (result == CUDA_SUCCESS)
            result = bare.copy_back(bare.address[i], host + i * bare.bytes, bytes_of(i), bare.stream);
    }
    CUresult waited = bare.stream_synchronize(bare.stream);
    return result == CUDA_SUCCESS ? waited : result;
}

/* Nothing is unmapped before everything has been copied. */
EXPORT int bare_pause_with_contents(char *host) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < bare.count && result == CUDA_SUCCESS; i++)
        result = bare.copy_out(host + i * bare.bytes, bare.address[i], bytes_of(i), bare.stream);
    CUresult waited = bare.stream_synchronize(bare.stream);
    if (result == CUDA_SUCCESS) result = waited;
    return result == CUDA_SUCCESS ? bare_pause() : result;
}

/* ---- a first pause: its host memory has to be made ---- */

/* In pieces that are pinned, and parts that a thread prefaults, as the library does it. */
#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define PART_BYTES      ((size_t)4 << 20)
#define PIECE_BYTES     ((size_t)64 << 20)
enum { MAX_THREADS = 64 };

static struct host {
    pthread_mutex_t lock;
    pthread_cond_t touched; /* a piece has been, all of it */
    void *mapping;
    size_t mapped_bytes;
    char *memory;
    size_t bytes, given_bytes; /* `given_bytes`: to threads that touch */
    size_t *untouched_bytes;   /* of each piece */
    size_t locked;             /* pieces */
} host = {.lock = PTHREAD_MUTEX_INITIALIZER, .touched = PTHREAD_COND_INITIALIZER};

static size_t smaller(size_t one, size_t other) { return one < other ? one : other; }
static size_t piece_bytes(size_t piece) { return smaller(PIECE_BYTES, host.bytes - piece * PIECE_BYTES); }

static void *touch_parts(void *unused) {
    (void)unused;
    pthread_mutex_lock(&host.lock);
    while (host.given_bytes < host.bytes) {
        size_t from = host.given_bytes, bytes = smaller(PART_BYTES, host.bytes - from);
        host.given_bytes += bytes;
        pthread_mutex_unlock(&host.lock);
        for (size_t at = from; at < from + bytes; at += HUGE_PAGE_BYTES) ((volatile char *)host.memory)[at] = 0;
        pthread_mutex_lock(&host.lock);
        size_t *left = &host.untouched_bytes[from / PIECE_BYTES];
        *left -= bytes;
        if (*left == 0) pthread_cond_signal(&host.touched);
    }
    pthread_mutex_unlock(&host.lock);
    return NULL;
}

static int map_host(size_t bytes) {
    size_t pieces = (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    host.bytes = bytes;
    host.given_bytes = host.locked = 0;
    host.mapped_bytes = bytes + HUGE_PAGE_BYTES;
    host.untouched_bytes = calloc(pieces, sizeof *host.untouched_bytes);
    if (host.untouched_bytes == NULL) return FAILED;
    host.mapping = mmap(NULL, host.mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (host.mapping == MAP_FAILED) {
        free(host.untouched_bytes);
        return FAILED;
    }
    uintptr_t aligned = ((uintptr_t)host.mapping + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    host.memory = (char *)aligned;
    (void)madvise(host.memory, bytes, MADV_HUGEPAGE); /* advice; where it is not taken, things are slower */
    for (size_t piece = 0; piece < pieces; piece++) host.untouched_bytes[piece] = piece_bytes(piece);
    return CUDA_SUCCESS;
}

/* Once it has been prefaulted. */
static CUresult lock_piece(size_t piece) {
    pthread_mutex_lock(&host.lock);
    while (host.untouched_bytes[piece] > 0) pthread_cond_wait(&host.touched, &host.lock);
    pthread_mutex_unlock(&host.lock);
    CUresult result = bare.lock_host(host.memory + piece * PIECE_BYTES, piece_bytes(piece), REGISTER_PORTABLE);
    if (result == CUDA_SUCCESS) host.locked++;
    return result;
}

/* A copy must not cross from one registration to the next. */
static CUresult lock_and_copy(void) {
    CUresult result = CUDA_SUCCESS;
    for (size_t bytes, at = 0; at < host.bytes && result == CUDA_SUCCESS; at += bytes) {
        bytes = smaller(smaller(bare.bytes - at % bare.bytes, PIECE_BYTES - at % PIECE_BYTES), host.bytes - at);
        if (at % PIECE_BYTES == 0) result = lock_piece(at / PIECE_BYTES);
        if (result == CUDA_SUCCESS)
            result = bare.copy_out(host.memory + at, bare.address[at / bare.bytes] + at % bare.bytes, bytes, bare.stream);
    }
    CUresult waited = bare.stream_synchronize(bare.stream);
    return result == CUDA_SUCCESS ? waited : result;
}

/* A pause that finds no host memory has to do this: `threads` of them prefault it, and it is pinned and copied to piece
 * by piece. It stays until bare_forget_host. */
EXPORT int bare_first_pause(int threads) {
    pthread_t started[MAX_THREADS];
    int count = 0, result = map_host((bare.count - 1) * bare.bytes + bare.last_bytes);
    if (result != CUDA_SUCCESS) return result;
    while (count < threads && count < MAX_THREADS && pthread_create(&started[count], NULL, touch_parts, NULL) == 0) count++;
    if (count == 0) (void)touch_parts(NULL);
    result = lock_and_copy();
    for (int i = 0; i < count; i++) pthread_join(started[i], NULL);
    return result == CUDA_SUCCESS ? bare_pause() : result;
}

EXPORT int bare_forget_host(void) {
    CUresult result = CUDA_SUCCESS;
    for (; host.locked > 0 && result == CUDA_SUCCESS; host.locked--)
        result = bare.unlock_host(host.memory + (host.locked - 1) * PIECE_BYTES);
    free(host.untouched_bytes);
    host.untouched_bytes = NULL;
    if (munmap(host.mapping, host.mapped_bytes) != 0) return FAILED;
    return result;
}

/* ---- the ranges ---- */

/* Reserves `count` ranges of `bytes` bytes, the last one of `last_bytes`, without memory. */
EXPORT int bare_make(size_t count, size_t bytes, size_t last_bytes) {
    bare.address = calloc(count, sizeof *bare.address);
    bare.handle = calloc(count, sizeof *bare.handle);
    if (bare.address == NULL || bare.handle == NULL) return FAILED;
    CUresult result = CUDA_SUCCESS;
    bare.count = count;
    bare.bytes = bytes;
    bare.last_bytes = last_bytes;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = bare.reserve(&bare.address[i], bytes_of(i), 0, 0, 0);
    return result;
}

EXPORT CUdeviceptr bare_address(size_t i) { return bare.address[i]; }

/* The reverse of bare_make; nothing may be mapped. */
EXPORT int bare_unmake(void) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < bare.count && result == CUDA_SUCCESS; i++) result = bare.unreserve(bare.address[i], bytes_of(i));
    free(bare.address);
    free(bare.handle);
    bare.address = NULL;
    bare.handle = NULL;
    bare.count = 0;
    return result;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)time.tv_nsec;
}

/* `count` allocations of `bytes` bytes by the driver alone, then their frees; nanoseconds of each loop. */
EXPORT int bare_allocate_and_free(size_t count, size_t bytes, uint64_t *allocate_ns, uint64_t *free_ns) {
    CUdeviceptr *address = calloc(count, sizeof *address);
    CUhandle *handle = calloc(count, sizeof *handle);
    if (address == NULL || handle == NULL) {
        free(address);
        free(handle);
        return FAILED;
    }
    CUresult result = CUDA_SUCCESS;
    uint64_t start = now();
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        result = bare.reserve(&address[i], bytes, 0, 0, 0);
        if (result == CUDA_SUCCESS) result = bare.create(&handle[i], bytes, &bare.properties, 0);
        if (result == CUDA_SUCCESS) result = bare.map(address[i], bytes, 0, handle[i], 0);
        if (result == CUDA_SUCCESS) result = bare.set_access(address[i], bytes, &bare.access, 1);
    }
    uint64_t middle = now();
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        result = bare.unmap(address[i], bytes);
        if (result == CUDA_SUCCESS) result = bare.release(handle[i]);
        if (result == CUDA_SUCCESS) result = bare.unreserve(address[i], bytes);
    }
    *free_ns = now() - middle;
    *allocate_ns = middle - start;
    free(address);
    free(handle);
    return result;
}

/* `count` allocations through the function `allocate` of the library's table (tms.h), which says by a status of 0 that it
 * succeeded; nanoseconds of the loop. */
EXPORT int core_allocate(int (*allocate)(uint64_t, int32_t, uint64_t *, void *), size_t count, size_t bytes,
                         uint64_t *address, uint64_t *nanoseconds) {
    int status = 0;
    uint64_t start = now();
    for (size_t i = 0; i < count && status == 0; i++) status = allocate(bytes, -1, &address[i], NULL);
    *nanoseconds = now() - start;
    return status;
}

/* Their frees through its function `free`. */
EXPORT int core_free(int (*free_one)(uint64_t, void *), size_t count, const uint64_t *address, uint64_t *nanoseconds) {
    int status = 0;
    uint64_t start = now();
    for (size_t i = 0; i < count && status == 0; i++) status = free_one(address[i], NULL);
    *nanoseconds = now() - start;
    return status;
}
