/* Guards the order in which requests for the locks of devices are served, with real processes. Each test runs in a process
 * of its own, which starts the others, tells them through pipes what to do, and reads in one pipe what happens to all. A
 * process reports that it waits from the callback of its call, when it has its ticket. */
#include "support/device_lock_fixture.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>

enum {
    LIMIT_MS = 60000, /* an event that does not come by then never comes */
    ENDLESS = 1 << 30,
    LOOK = 5, /* callbacks: between the first and the last of them there was a look at the queue */
};

/* Pairs of bytes: a process, and 'w' it waits, 'h' it holds, 'n' it ran out of time, 'i' it was interrupted, 'f' it has
 * forked. */
static int events[2];
/* Closing it ends the processes that were forked. */
static int kept[2];
static int patience = ENDLESS;

typedef struct other {
    char id;
    pid_t process;
    int commands;
} other_t;

/* ---- the other processes ---- */

static char own_id;
static atomic_int interrupted, announcements; /* set by signal handlers */

typedef struct request {
    tms_device_mask_t devices;
    double seconds;
    bool has_reported;
} request_t;

static void emit(char event) {
    const char pair[2] = {own_id, event};
    CHECK(write(events[1], pair, 2) == 2);
}

static void on_signal(int number) {
    if (number == SIGUSR1)
        atomic_store(&interrupted, 1);
    else
        atomic_store(&announcements, LOOK);
}

static int32_t report_waiting(void *argument) {
    request_t *request = argument;
    if (atomic_load(&announcements) > 0 && atomic_fetch_sub(&announcements, 1) == 1) emit('w');
    if (!request->has_reported) emit('w');
    request->has_reported = true;
    return atomic_load(&interrupted);
}

static void *run_request(void *argument) {
    request_t request = *(request_t *)argument;
    tms_error_t failed;
    tms_wait_t wait;
    free(argument);
    tms_wait_begin(&wait, report_waiting, &request, request.seconds);
    switch (tms_device_locks_acquire(locks(), request.devices, &wait, &context, &failed)) {
    case TMS_OK: emit('h'); break;
    case TMS_DEVICE_LOCKED: emit('n'); break;
    case TMS_INTERRUPTED: emit('i'); break;
    default: _exit(2);
    }
    return NULL;
}

/* Runs each request on a thread of its own. */
static void begin_request(tms_device_mask_t devices, double seconds) {
    pthread_t thread;
    request_t *request = malloc(sizeof(*request));
    CHECK(request);
    *request = (request_t){.devices = devices, .seconds = seconds, .has_reported = !isinf(seconds)};
    CHECK(pthread_create(&thread, NULL, run_request, request) == 0 && pthread_detach(thread) == 0);
}

static void outlive_the_parent(void) {
    char byte;
    if (fork() != 0) return;
    emit('f');
    _exit(read(kept[0], &byte, 1) == 0 ? 0 : 1);
}

static void serve(int commands) {
    char command[2];
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0); /* it may be stopped when the test ends */
    close(kept[1]);
    signal(SIGUSR1, on_signal);
    signal(SIGUSR2, on_signal);
    locks()->queue.patience = patience;
    while (TEMP_FAILURE_RETRY(read(commands, command, 2)) == 2) { /* signals interrupt it under TSan */
        tms_device_mask_t devices = (tms_device_mask_t)command[1];
        if (command[0] == 'a') begin_request(devices, INFINITY);
        if (command[0] == 't') begin_request(devices, 0.1);
        if (command[0] == 'r') tms_device_locks_release(locks(), devices);
        if (command[0] == 'f') outlive_the_parent();
    }
    _exit(0);
}

/* ---- the process of the test ---- */

static other_t begin(char id) {
    int commands[2];
    if (events[1] == 0) CHECK(pipe(events) == 0 && pipe(kept) == 0);
    CHECK(pipe(commands) == 0);
    pid_t process = fork();
    CHECK(process >= 0);
    if (process == 0) {
        close(commands[1]);
        own_id = id;
        serve(commands[0]);
    }
    close(commands[0]);
    CHECK(fcntl(commands[1], F_SETFD, FD_CLOEXEC) == 0);
    return (other_t){.id = id, .process = process, .commands = commands[1]};
}

static void tell(const other_t *other, char command, tms_device_mask_t devices) {
    const char pair[2] = {command, (char)devices};
    CHECK(write(other->commands, pair, 2) == 2);
}

static void expect(const other_t *other, char event) {
    char pair[2] = {'-', '-'};
    struct pollfd awaited = {.fd = events[0], .events = POLLIN};
    CHECK(poll(&awaited, 1, LIMIT_MS) == 0 || read(events[0], pair, 2) == 2);
    if (pair[0] != other->id || pair[1] != event)
        fprintf(stderr, "expected %c %c, and got %c %c\n", other->id, event, pair[0], pair[1]);
    CHECK(pair[0] == other->id && pair[1] == event);
}

static void hold(const other_t *other, tms_device_mask_t devices) {
    tell(other, 'a', devices);
    expect(other, 'h');
}

static void queue_up(const other_t *other, tms_device_mask_t devices) {
    tell(other, 'a', devices);
    expect(other, 'w');
}

/* Waits until the other has looked at the queue again. */
static void await_poll(const other_t *other) {
    CHECK(kill(other->process, SIGUSR2) == 0);
    expect(other, 'w');
}

static void kill_other(const other_t *other) {
    CHECK(kill(other->process, SIGKILL) == 0 && waitpid(other->process, NULL, 0) == other->process);
}

static void stop_other(const other_t *other) {
    int status = 0;
    CHECK(kill(other->process, SIGSTOP) == 0 && waitpid(other->process, &status, WUNTRACED) == other->process);
    CHECK(WIFSTOPPED(status));
}

/* Counts the tickets, and removes them if asked to. */
static int tickets(bool removes) {
    int count = 0;
    DIR *stream = opendir(base);
    CHECK(stream);
    for (const struct dirent *entry; (entry = readdir(stream));) {
        if (!strstr(entry->d_name, ".ticket")) continue;
        count++;
        if (removes) CHECK(unlinkat(dirfd(stream), entry->d_name, 0) == 0);
    }
    closedir(stream);
    return count;
}

/* ---- bodies ---- */

static void serve_in_the_order_of_coming(void) {
    other_t h = begin('H'), a = begin('A'), b = begin('B'), c = begin('C');
    hold(&h, 1);
    queue_up(&a, 1);
    queue_up(&b, 1);
    queue_up(&c, 1);
    CHECK(tickets(false) == 3);
    tell(&h, 'r', 1);
    expect(&a, 'h');
    tell(&a, 'r', 1);
    expect(&b, 'h');
    tell(&b, 'r', 1);
    expect(&c, 'h');
    CHECK(tickets(false) == 0);
}

/* Each of three is served again after the turns of the two others. */
static void put_who_asks_again_behind_those_who_wait(void) {
    other_t all[3] = {begin('A'), begin('B'), begin('C')};
    hold(&all[0], 1);
    queue_up(&all[1], 1);
    queue_up(&all[2], 1);
    for (int turn = 0; turn < 9; turn++) {
        tell(&all[turn % 3], 'r', 1);
        expect(&all[(turn + 1) % 3], 'h');
        queue_up(&all[turn % 3], 1);
    }
}

/* A process that releases the device and asks again at once does not get it, even if the next one has not noticed yet. */
static void not_let_the_holder_pass_who_waits(void) {
    other_t a = begin('A'), b = begin('B');
    hold(&a, 1);
    queue_up(&b, 1);
    stop_other(&b);
    tell(&a, 'r', 1);
    queue_up(&a, 1);
    CHECK(kill(b.process, SIGCONT) == 0);
    expect(&b, 'h');
    tell(&b, 'r', 1);
    expect(&a, 'h');
}

static void forget_who_is_killed_while_waiting(void) {
    other_t h = begin('H'), a = begin('A'), b = begin('B');
    hold(&h, 1);
    queue_up(&a, 1);
    queue_up(&b, 1);
    kill_other(&a);
    tell(&h, 'r', 1);
    expect(&b, 'h');
    CHECK(tickets(false) == 0);
}

static void serve_the_next_when_the_holder_is_killed(void) {
    other_t h = begin('H'), a = begin('A'), b = begin('B');
    hold(&h, 3);
    queue_up(&a, 1);
    queue_up(&b, 3);
    kill_other(&h);
    expect(&a, 'h');
    kill_other(&a);
    expect(&b, 'h');
}

/* A stopped process is passed, and has its old place when it goes on. */
static void pass_who_is_stopped(void) {
    other_t h = begin('H'), a = begin('A'), c = begin('C');
    patience = 3;
    other_t b = begin('B');
    hold(&h, 1);
    queue_up(&a, 1);
    queue_up(&b, 1);
    stop_other(&a);
    tell(&h, 'r', 1);
    expect(&b, 'h');
    queue_up(&c, 1);
    CHECK(kill(a.process, SIGCONT) == 0);
    await_poll(&a);
    tell(&b, 'r', 1);
    expect(&a, 'h');
    tell(&a, 'r', 1);
    expect(&c, 'h');
}

static void forget_who_runs_out_of_time_or_is_interrupted(void) {
    other_t h = begin('H'), a = begin('A'), b = begin('B'), c = begin('C');
    hold(&h, 1);
    tell(&a, 't', 1);
    expect(&a, 'n');
    CHECK(tickets(false) == 0);
    queue_up(&b, 1);
    queue_up(&c, 1);
    CHECK(kill(b.process, SIGUSR1) == 0);
    expect(&b, 'i');
    CHECK(tickets(false) == 1);
    tell(&h, 'r', 1);
    expect(&c, 'h');
    CHECK(tickets(false) == 0);
}

static void refuse_at_once_where_others_wait(void) {
    char part[96];
    other_t h = begin('H'), a = begin('A');
    hold(&h, 1);
    queue_up(&a, 1);
    CHECK(acquire(3) == TMS_DEVICE_LOCKED && error.device == 0 && strstr(error.message, file_of(0)));
    snprintf(part, sizeof part, "Process %ld (%.15s) has held it since 2", (long)h.process, program_invocation_short_name);
    CHECK(strstr(error.message, part));
    snprintf(part, sizeof part, "Process %ld (%.15s) has waited for it since 2", (long)a.process,
             program_invocation_short_name);
    CHECK(strstr(error.message, part) && !strstr(error.message, "stopped"));
    stop_other(&h);
    CHECK(acquire(3) == TMS_DEVICE_LOCKED && strstr(error.message, "Z. That process is stopped, by a signal or a debugger"));
    stop_other(&a);
    kill_other(&h);
    CHECK(!is_locked(0) && acquire(1) == TMS_DEVICE_LOCKED && tickets(false) == 1);
    CHECK(acquire(2) == TMS_OK); /* the other device has no queue */
}

static void keep_the_place_at_each_device(void) {
    other_t h = begin('H'), both = begin('X'), first = begin('Y'), second = begin('Z');
    hold(&h, 2);
    queue_up(&both, 3);
    queue_up(&first, 1); /* device 0 is free, and kept for the request for both */
    queue_up(&second, 2);
    tell(&h, 'r', 2);
    expect(&both, 'h');
    tell(&both, 'r', 2);
    expect(&second, 'h');
    tell(&both, 'r', 1);
    expect(&first, 'h');
}

/* Otherwise the two would wait for each other. */
static void let_a_holder_pass_who_waits_for_it(void) {
    other_t a = begin('A'), both = begin('X'), second = begin('Z');
    hold(&a, 1);
    queue_up(&both, 3);
    hold(&a, 2);
    tell(&a, 'r', 2);
    queue_up(&second, 2);
    hold(&a, 2);
    tell(&a, 'r', 3);
    expect(&both, 'h');
    tell(&both, 'r', 3);
    expect(&second, 'h');
}

/* The holder of one device does not pass processes that wait for another. */
static void not_let_a_holder_pass_the_others(void) {
    other_t a = begin('A'), h = begin('H'), b = begin('B');
    hold(&a, 1);
    hold(&h, 2);
    queue_up(&b, 2);
    queue_up(&a, 3);
    tell(&h, 'r', 2);
    expect(&b, 'h');
    tell(&b, 'r', 2);
    expect(&a, 'h');
}

static void let_the_threads_of_a_process_share_its_turn(void) {
    other_t h = begin('H'), a = begin('A'), b = begin('B');
    hold(&h, 1);
    queue_up(&a, 1);
    queue_up(&b, 1);
    queue_up(&a, 1);
    tell(&h, 'r', 1);
    expect(&a, 'h');
    expect(&a, 'h');
    tell(&a, 'r', 1);
    hold(&a, 1); /* it still holds the device */
    tell(&a, 'r', 1);
    tell(&a, 'r', 1);
    expect(&b, 'h');
    CHECK(tickets(false) == 0);
}

/* A child of a process that waits or holds does not take over the ticket or the lock. */
static void belong_to_the_process_that_waits(void) {
    other_t h = begin('H'), a = begin('A'), b = begin('B');
    hold(&h, 1);
    queue_up(&a, 1);
    queue_up(&b, 1);
    tell(&h, 'f', 0);
    expect(&h, 'f');
    tell(&a, 'f', 0);
    expect(&a, 'f');
    CHECK(tickets(false) == 2); /* the child has not removed its parent's */
    kill_other(&a);
    kill_other(&h);
    expect(&b, 'h');
    close(kept[1]); /* ends the children */
}

static void make_removed_tickets_again(void) {
    other_t h = begin('H'), a = begin('A'), b = begin('B'), c = begin('C');
    hold(&h, 1);
    queue_up(&a, 1);
    queue_up(&b, 1);
    CHECK(tickets(true) == 2);
    await_poll(&b);
    await_poll(&a);
    queue_up(&c, 1);
    CHECK(tickets(false) == 3);
    tell(&h, 'r', 1);
    expect(&a, 'h');
    tell(&a, 'r', 1);
    expect(&b, 'h');
    tell(&b, 'r', 1);
    expect(&c, 'h');
}

#define TICKET "torch_memory_saver-0000000000000001-00000000000000ab.ticket"

static void refuse_hostile_tickets(void) {
    CHECK(acquire(1) == TMS_OK);
    tms_device_locks_release(locks(), 1);
    int before = open_descriptors();
    CHECK(symlink("/dev/null", below(TICKET)) == 0);
    CHECK(acquire(1) == TMS_INVALID_STATE && error.os_error == ELOOP && strstr(error.message, below(TICKET)));
    CHECK(unlink(below(TICKET)) == 0 && mkfifo(below(TICKET), 0600) == 0);
    CHECK(acquire(1) == TMS_INVALID_STATE && error.os_error == EPERM && strstr(error.message, below(TICKET)));
    CHECK(unlink(below(TICKET)) == 0 && rename(file_of(0), below("x" TICKET)) == 0); /* not the name of a ticket */
    CHECK(open_descriptors() == before);
    CHECK(acquire(1) == TMS_OK && access(below("x" TICKET), F_OK) == 0);
}

/* As on the simulated GPU. */
#define DEVICE_0 "1 1\nGPU-53696d75-6c61-7465-6420-475055000000\n"

static void remove_tickets_of_dead_processes(void) {
    int fd = open(below(TICKET), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, DEVICE_0, strlen(DEVICE_0)) > 0 && close(fd) == 0);
    CHECK(acquire(1) == TMS_OK && tickets(false) == 0);
}

/* A request that cannot take a ticket fails, and names the file. */
static void say_that_a_ticket_cannot_be_written(void) {
    tms_wait_t wait;
    holder_t holder = start_holder(1);
    CHECK(acquire(2) == TMS_OK);
    int before = open_descriptors();
    fault.pwrite_error = ENOSPC;
    tms_wait_begin(&wait, NULL, NULL, INFINITY);
    CHECK(tms_device_locks_acquire(locks(), 1, &wait, &context, &error) == TMS_INVALID_STATE);
    CHECK(error.os_error == ENOSPC && strcmp(error.call, "pwrite") == 0 && strstr(error.message, ".ticket"));
    CHECK(tickets(false) == 0 && open_descriptors() == before && !locks()->queue.waiting);
    end_holder(&holder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        LOCKS(serve_in_the_order_of_coming),
        LOCKS(put_who_asks_again_behind_those_who_wait),
        LOCKS(not_let_the_holder_pass_who_waits),
        LOCKS(forget_who_is_killed_while_waiting),
        LOCKS(serve_the_next_when_the_holder_is_killed),
        LOCKS(pass_who_is_stopped),
        LOCKS(forget_who_runs_out_of_time_or_is_interrupted),
        LOCKS(refuse_at_once_where_others_wait),
        LOCKS(keep_the_place_at_each_device),
        LOCKS(let_a_holder_pass_who_waits_for_it),
        LOCKS(not_let_a_holder_pass_the_others),
        LOCKS(let_the_threads_of_a_process_share_its_turn),
        LOCKS(belong_to_the_process_that_waits),
        LOCKS(make_removed_tickets_again),
        LOCKS(refuse_hostile_tickets),
        LOCKS(remove_tickets_of_dead_processes),
        LOCKS(say_that_a_ticket_cannot_be_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
