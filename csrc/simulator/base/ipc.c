#include "simulator/base/ipc.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulator/base/state.h"

CUresult sim_ipc_write(const sim_ipc_name_t *name, char *handle) {
    struct stat status;
    sim_ipc_name_t complete = *name;
    if (fstat(name->file, &status) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    complete.file_id = status.st_ino;
    memset(handle, 0, CU_IPC_HANDLE_SIZE);
    memcpy(handle, &complete, sizeof complete);
    return CUDA_SUCCESS;
}

bool sim_ipc_read(sim_ipc_name_t *name, const char *handle, sim_ipc_kind_t kind) {
    memcpy(name, handle, sizeof *name);
    return name->kind == (uint32_t)kind;
}

int sim_ipc_open(const sim_ipc_name_t *name) {
    char path[SIM_NAME_BYTES];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name->process, name->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return -1;
    if (fstat(file, &status) == 0 && status.st_ino == name->file_id) return file;
    close(file);
    return -1;
}
