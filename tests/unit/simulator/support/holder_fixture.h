/* Shared by the tests of processes with one budget, of 16 MiB: a process that holds 12 MiB of it. Programs that start one
 * have the role "hold". */
#ifndef TMS_TESTS_HOLDER_FIXTURE_H
#define TMS_TESTS_HOLDER_FIXTURE_H

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "own_process.h"
#include "processes_fixture.h"

/* Ends when its input ends, or when it is killed. */
typedef struct holder {
    pid_t pid;
    int input, output;
} holder_t;

static void become_holder(const int *down, const int *up) {
    dup2(down[0], STDIN_FILENO);
    dup2(up[1], STDOUT_FILENO);
    close(down[1]);
    close(up[0]);
    execute_again("hold");
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

static void end_holder(const holder_t *holder) {
    int status = 0;
    close(holder->input);
    close(holder->output);
    waitpid(holder->pid, &status, 0);
}

static void kill_holder(const holder_t *holder) {
    kill(holder->pid, SIGKILL);
    end_holder(holder);
}

static int hold(void) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    char byte = 'h';
    if (CALL(cuInit, 0) != CUDA_SUCCESS || CALL(cuMemCreate, &handle, 12 * MIB, &properties, 0) != CUDA_SUCCESS) byte = 'x';
    if (write(STDOUT_FILENO, &byte, 1) != 1) return CHILD_FAILED;
    return read(STDIN_FILENO, &byte, 1) == 0 ? 0 : CHILD_FAILED;
}

#endif
