/* Accounting of device memory.
 *
 * Without TMS_SIMULATED_SHARED a process compares its own charges with TMS_SIMULATED_MEMORY. With it, POSIX shared memory
 * holds the charges of all processes of that name, guarded by a robust mutex. A process that is killed while it holds the
 * mutex leaves it usable. The entry of a killed process is removed by the next process that attaches, queries the memory
 * or runs out of it. The first process of a name sets the budgets; the last one to leave unlinks the name.
 *
 * Anybody may make a file in /dev/shm, so the name may lead to one that is not the machine's, or that another user can lock
 * or truncate. Such a file is never locked or mapped: the process reports it, and compares its own charges only. */
#include "simulator/devices/budget.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulator/base/process.h"
#include "simulator/base/simulation.h"
#include "simulator/devices/visible.h"
#include "simulator/simulator.h"

enum {
    SEATS = SIM_BUDGET_PROCESSES,
    SHARED_MODE = 0600,
    OTHERS = 077,       /* permissions that the file of a machine never has */
    FORMAT = 0x324D5354 /* "TSM2": changes with sim_shared */
};

typedef struct sim_seat {
    int pid; /* 0: free */
    unsigned long long started;
    uint64_t charged[TMS_SIM_MAX_DEVICES];
    unsigned contexts[TMS_SIM_MAX_DEVICES];
} sim_seat_t;

struct sim_shared {
    uint64_t format; /* FORMAT once the rest is initialised; 0 before that, even if the process that began it was killed */
    pthread_mutex_t lock;
    uint64_t device_bytes;
    sim_seat_t seats[SEATS];
};

static void lock_these(sim_shared_t *shared) {
    /* An entry is valid only if its pid is set, and is cleared before it is reused, so any state of an exited owner is
     * consistent. */
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}

static void lock_shared(void) { lock_these(sim_state.shared); }

static void unlock_shared(void) { pthread_mutex_unlock(&sim_state.shared->lock); }

static void remove_dead_entries(sim_shared_t *shared) {
    for (unsigned i = 0; i < SEATS; i++) {
        sim_seat_t *seat = &shared->seats[i];
        if (seat->pid && seat->started != sim_process_started(seat->pid)) seat->pid = 0;
    }
}

static bool take_seat(void) {
    sim_shared_t *shared = sim_state.shared;
    lock_shared();
    remove_dead_entries(shared);
    unsigned seat = 0;
    while (seat < SEATS && shared->seats[seat].pid) seat++;
    if (seat < SEATS) {
        shared->seats[seat] = (sim_seat_t){.started = sim_process_started(getpid())};
        shared->seats[seat].pid = getpid();
        sim_state.shared_seat = seat;
    }
    unlock_shared();
    return seat < SEATS;
}

static void initialize_shared(sim_shared_t *shared) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    shared->device_bytes = sim_state.device_bytes;
    shared->format = FORMAT;
}

/* Returns why the file cannot be that of a machine of this user, or NULL. */
static const char *find_rejection(const struct stat *status) {
    if (!S_ISREG(status->st_mode)) return "it is not a regular file";
    if (status->st_uid != geteuid()) return "it belongs to another user";
    if (status->st_mode & OTHERS) return "other users can use it";
    return NULL;
}

/* Opens the file of the name, locked against processes that attach or leave. Retries if the file was unlinked. Returns -1
 * and the reason if there is none or if it is unfit. */
static int open_shared(const char *name, int flags, const char **reason) {
    for (;;) {
        struct stat status;
        int file = shm_open(name, O_RDWR | flags, SHARED_MODE);
        *reason = file < 0 || fstat(file, &status) != 0 ? strerror(errno) : find_rejection(&status);
        if (!*reason && flock(file, LOCK_EX) == 0 && fstat(file, &status) == 0 && status.st_nlink > 0) return file;
        if (file >= 0) close(file);
        if (*reason) return -1;
    }
}

/* Maps the locked file. With `make`, initialises one that is empty or that a killed process left with zeros only. Returns
 * NULL and the reason if it is not the file of a machine. */
static sim_shared_t *map_shared(int file, bool make, const char **reason) {
    struct stat status;
    if (fstat(file, &status) != 0) goto failed;
    bool empty = status.st_size == 0 && make;
    if (empty && ftruncate(file, sizeof(sim_shared_t)) != 0) goto failed;
    *reason = "its size is not that of a simulated machine";
    if (!empty && status.st_size != sizeof(sim_shared_t)) return NULL;
    sim_shared_t *shared = mmap(NULL, sizeof(sim_shared_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) goto failed;
    if (make && shared->format == 0) initialize_shared(shared);
    if (shared->format == FORMAT) return shared;
    munmap(shared, sizeof(sim_shared_t));
    *reason = "its contents are not those of a simulated machine";
    return NULL;
failed:
    *reason = strerror(errno);
    return NULL;
}

void sim_budget_attach(void) {
    const char *reason = NULL;
    if (!sim_state.shared_name[0]) return;
    int file = open_shared(sim_state.shared_name, O_CREAT, &reason);
    sim_shared_t *shared = file >= 0 ? map_shared(file, true, &reason) : NULL;
    if (shared) {
        sim_state.shared = shared;
        sim_state.shared_file = file;
        bool seated = take_seat();
        flock(file, LOCK_UN);
        if (seated) return;
        reason = "too many processes use it";
        sim_state.shared = NULL;
        sim_state.shared_file = -1;
        munmap(shared, sizeof(sim_shared_t));
    }
    fprintf(
        stderr,
        "simulated GPU: the budget is not shared as /dev/shm%s: %s; set TMS_SIMULATED_SHARED to another name, or remove the "
        "file if no program uses it\n",
        sim_state.shared_name, reason);
    if (file >= 0) close(file);
}

void sim_budget_detach(void) {
    if (!sim_state.shared) return;
    flock(sim_state.shared_file, LOCK_EX);
    lock_shared();
    sim_state.shared->seats[sim_state.shared_seat].pid = 0;
    remove_dead_entries(sim_state.shared);
    bool empty = true;
    for (unsigned i = 0; i < SEATS; i++) empty = empty && !sim_state.shared->seats[i].pid;
    unlock_shared();
    if (empty) shm_unlink(sim_state.shared_name);
    munmap(sim_state.shared, sizeof(sim_shared_t));
    close(sim_state.shared_file); /* also releases the lock */
    sim_state.shared = NULL;
    sim_state.shared_file = -1;
}

static uint64_t shared_charges(int device) {
    uint64_t charged = 0;
    for (unsigned i = 0; i < SEATS; i++) {
        if (sim_state.shared->seats[i].pid) charged += sim_state.shared->seats[i].charged[sim_state.visible[device]];
    }
    return charged;
}

/* Copies this process's charge and its number of contexts to its shared entry. */
static void store_charge(int device) {
    const sim_device_t *own = &sim_state.devices[device];
    sim_seat_t *seat = &sim_state.shared->seats[sim_state.shared_seat];
    seat->charged[sim_state.visible[device]] = own->used + own->taken;
    seat->contexts[sim_state.visible[device]] = own->contexts;
}

bool sim_budget_charge(int device, uint64_t bytes, bool taken) {
    sim_device_t *own = &sim_state.devices[device];
    uint64_t *account = taken ? &own->taken : &own->used, total = sim_budget_total();
    bool fits = false;
    if (!sim_state.shared) {
        fits = bytes <= total && own->used + own->taken <= total - bytes;
        if (fits) *account += bytes;
        return fits;
    }
    lock_shared();
    if (bytes <= total && shared_charges(device) > total - bytes) remove_dead_entries(sim_state.shared);
    fits = bytes <= total && shared_charges(device) <= total - bytes;
    if (fits) *account += bytes;
    store_charge(device);
    unlock_shared();
    return fits;
}

bool sim_budget_credit(int device, uint64_t bytes, bool taken) {
    sim_device_t *own = &sim_state.devices[device];
    uint64_t *account = taken ? &own->taken : &own->used;
    if (*account < bytes) return false;
    *account -= bytes;
    if (!sim_state.shared) return true;
    lock_shared();
    store_charge(device);
    unlock_shared();
    return true;
}

void sim_budget_count_context(int device, int change) {
    sim_state.devices[device].contexts += (unsigned)change;
    if (!sim_state.shared) return;
    lock_shared();
    store_charge(device);
    unlock_shared();
}

uint64_t sim_budget_available(int device) {
    uint64_t charged = sim_state.devices[device].used + sim_state.devices[device].taken, total = sim_budget_total();
    if (sim_state.shared) {
        lock_shared();
        remove_dead_entries(sim_state.shared);
        charged = shared_charges(device);
        unlock_shared();
    }
    return charged < total ? total - charged : 0;
}

uint64_t sim_budget_total(void) { return sim_state.shared ? sim_state.shared->device_bytes : sim_state.device_bytes; }

static unsigned own_process(int machine_index, sim_budget_process_t *rows) {
    for (int device = 0; device < sim_state.device_count; device++) {
        const sim_device_t *own = &sim_state.devices[device];
        if (sim_state.visible[device] != machine_index || !(own->used || own->contexts)) continue;
        rows[0] = (sim_budget_process_t){getpid(), own->used};
        return 1;
    }
    return 0;
}

static uint64_t taken_by_control(int machine_index) {
    for (int device = 0; device < sim_state.device_count; device++) {
        if (sim_state.visible[device] == machine_index) return sim_state.devices[device].taken;
    }
    return 0;
}

static unsigned processes_of(sim_shared_t *shared, int machine_index, sim_budget_process_t *rows) {
    unsigned count = 0;
    lock_these(shared);
    remove_dead_entries(shared);
    for (unsigned i = 0; i < SEATS; i++) {
        const sim_seat_t *seat = &shared->seats[i];
        if (!seat->pid) continue;
        uint64_t bytes = seat->charged[machine_index];
        if (seat->pid == getpid()) bytes -= taken_by_control(machine_index);
        if (bytes || seat->contexts[machine_index]) rows[count++] = (sim_budget_process_t){seat->pid, bytes};
    }
    pthread_mutex_unlock(&shared->lock);
    return count;
}

/* For a process that has not joined: reads the entries without taking one. */
static unsigned processes_of_name(const char *name, int machine_index, sim_budget_process_t *rows) {
    const char *reason = NULL;
    unsigned count = 0;
    int file = open_shared(name, 0, &reason);
    if (file < 0) return 0; /* no process uses the name; a process that attaches reports an unfit file */
    sim_shared_t *shared = map_shared(file, false, &reason);
    if (shared) {
        count = processes_of(shared, machine_index, rows);
        munmap(shared, sizeof(sim_shared_t));
    }
    close(file);
    return count;
}

unsigned sim_budget_processes(const char *shared_name, int machine_index, sim_budget_process_t *rows) {
    unsigned count = 0;
    pthread_mutex_lock(&sim_state.lock);
    if (sim_state.shared)
        count = processes_of(sim_state.shared, machine_index, rows);
    else if (*shared_name)
        count = processes_of_name(shared_name, machine_index, rows);
    else
        count = own_process(machine_index, rows);
    pthread_mutex_unlock(&sim_state.lock);
    return count;
}
