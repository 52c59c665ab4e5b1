#include "simulator/base/process.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulator/base/simulation.h"

enum { PATH_BYTES = 32, STAT_BYTES = 1024, START_TIME_FIELD = 22 };

unsigned long long sim_process_started(int process) {
    char path[PATH_BYTES], text[STAT_BYTES];
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = '\0';
    /* The second field is the program's name in parentheses and can contain any character. */
    char *field = strrchr(text, ')');
    unsigned long long started = 0;
    if (!field || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X') return 0; /* a zombie holds no resources */
    for (int i = 2; field && i < START_TIME_FIELD; i++) field = strchr(field + 1, ' ');
    return field && sscanf(field, " %llu", &started) == 1 ? started : 0;
}

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
