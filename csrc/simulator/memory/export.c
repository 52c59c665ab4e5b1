/* Export of physical memory as a file descriptor, for other processes or this one.
 *
 * An export moves the memory from its device's memfd to a memfd of its own. Each exported descriptor is a new open file
 * description with a shared flock. Its duplicates in any process share that lock, and so do the mappings made through
 * them; the last close or unmap releases it. The owner tests for remaining holders with an exclusive flock, which fails
 * while there are any. A close sends no notification, so the owner repeats the test for released memory whenever it
 * counts memory. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/devices/visible.h"
#include "simulator/memory/entries.h"
#include "simulator/memory/mapping.h"
#include "simulator/memory/physical.h"

#define MEMORY_NAME "simulated memory of GPU "

static bool write_all(int file, const char *bytes, size_t count, off_t offset) {
    for (size_t done = 0; done < count;) {
        ssize_t written = pwrite(file, bytes + done, count - done, offset + (off_t)done);
        if (written < 0 && errno != EINTR) return false;
        if (written > 0) done += (size_t)written;
    }
    return true;
}

/* Copies only the data extents: large memory is mostly holes. */
static bool copy_contents(int from, off_t start, uint64_t bytes, int to) {
    enum { BUFFER_BYTES = 1 << 16 };
    char buffer[BUFFER_BYTES];
    off_t end = start + (off_t)bytes;
    for (off_t at = lseek(from, start, SEEK_DATA); at >= 0 && at < end; at = lseek(from, at, SEEK_DATA)) {
        size_t part = end - at < BUFFER_BYTES ? (size_t)(end - at) : BUFFER_BYTES;
        ssize_t got = pread(from, buffer, part, at);
        if (got <= 0 && !(got < 0 && errno == EINTR)) return false;
        if (got > 0 && !write_all(to, buffer, (size_t)got, at - start)) return false;
        if (got > 0) at += got;
    }
    return true;
}

/* Moves the memory to a memfd of its own. */
static CUresult move_to_own_file(sim_physical_t *physical) {
    char name[SIM_NAME_BYTES];
    struct stat status;
    int old = sim_state.devices[physical->device].memory;
    snprintf(name, sizeof name, MEMORY_NAME "%d", sim_state.visible[physical->device]);
    int file = memfd_create(name, MFD_CLOEXEC);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (ftruncate(file, (off_t)physical->bytes) != 0 || fstat(file, &status) != 0) goto failed;
    if (!copy_contents(old, physical->offset, physical->bytes, file)) goto failed;
    result = sim_memory_remap(physical, file);
    if (result != CUDA_SUCCESS) goto failed;
    sim_piece_put(&sim_state.devices[physical->device], physical->offset, physical->bytes, false);
    physical->file = file;
    physical->file_id = status.st_ino;
    physical->offset = 0;
    return CUDA_SUCCESS;
failed:
    close(file);
    return result;
}

/* Opens a new file description that holds the shared lock. */
static int open_exported(const sim_physical_t *physical) {
    char path[SIM_NAME_BYTES];
    snprintf(path, sizeof path, "/proc/self/fd/%d", physical->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return -1;
    if (flock(file, LOCK_SH) == 0) return file;
    close(file);
    return -1;
}

CUresult sim_memory_export(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                           unsigned long long flags) {
    sim_physical_t *physical = sim_memory_find_physical(handle);
    if (!shareable || flags || !physical) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(physical->handle_types & (unsigned)type))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_memory_await_pins(handle); /* no thread may touch it during the move */
    if (result != CUDA_SUCCESS) return result;
    physical = sim_memory_find_physical(handle); /* another thread may have released it during the wait */
    if (!physical) return CUDA_ERROR_INVALID_VALUE;
    if (physical->file < 0) result = move_to_own_file(physical);
    if (result != CUDA_SUCCESS) return result;
    int file = physical->imported ? fcntl(physical->file, F_DUPFD_CLOEXEC, 0) : open_exported(physical);
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *(int *)shareable = file;
    return CUDA_SUCCESS;
}

/* Returns the ordinal of the device that the file name contains, or -1 if the file is not simulated memory or the device is
 * not visible. */
static int device_of(int file) {
    char path[SIM_NAME_BYTES], target[SIM_NAME_BYTES];
    int machine_index = -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length < 0) return -1;
    target[length] = '\0';
    return sscanf(target, "/memfd:" MEMORY_NAME "%d", &machine_index) == 1 ? sim_visible_ordinal(machine_index) : -1;
}

/* Finds an earlier import of the file. Excludes the owner's own memory: an import by the owner is a move_to_own_file
 * handle. */
static sim_physical_t *find_import(uint64_t file_id) {
    for (size_t i = 0; i < sim_state.physicals.count; i++) {
        sim_physical_t *physical = sim_state.physicals.slots[i].value;
        if (physical->imported && !physical->runtime && physical->file_id == file_id) return physical;
    }
    return NULL;
}

CUresult sim_memory_import(CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type) {
    struct stat status;
    int given = (int)(intptr_t)shareable, device = -1;
    if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    if (fstat(given, &status) != 0) return CUDA_ERROR_INVALID_VALUE;
    if ((device = device_of(given)) < 0) return CUDA_ERROR_UNKNOWN; /* not simulated memory */
    sim_physical_t *physical = find_import(status.st_ino);
    if (physical) {
        physical->references++;
        *handle = physical->id;
        return CUDA_SUCCESS;
    }
    int file = fcntl(given, F_DUPFD_CLOEXEC, 0);
    physical = calloc(1, sizeof *physical);
    if (file < 0 || !physical) goto failed;
    *physical = (sim_physical_t){.id = sim_state_new_id(),
                                 .device = device,
                                 .bytes = (uint64_t)status.st_size,
                                 .references = 1,
                                 .handle_types = (unsigned)type,
                                 .imported = true,
                                 .file = file,
                                 .file_id = status.st_ino};
    if (!sim_table_insert(&sim_state.physicals, physical->id, physical)) goto failed;
    sim_state.devices[device].handles++;
    *handle = physical->id;
    return CUDA_SUCCESS;
failed:
    if (file >= 0) close(file);
    free(physical);
    return CUDA_ERROR_OUT_OF_MEMORY;
}
