/* Guards the locks of the devices between processes: the holder, the waiters, and what a forked child may do. Each test
 * runs in a process of its own and forks before it uses the driver, because a forked child could not use it afterwards. */
#include "support/device_lock_fixture.h"

static int questions;

/* ---- bodies ---- */

static void count_per_device(void) {
    CHECK(acquire(0) == TMS_OK);
    CHECK(!is_locked(0));
    CHECK(acquire(3) == TMS_OK);
    CHECK(is_locked(0) && is_locked(1));
    CHECK(acquire(1) == TMS_OK);
    tms_device_locks_retain(locks(), 1);
    tms_device_locks_release(locks(), 3);
    CHECK(is_locked(0) && is_locked(1));
    tms_device_locks_release(locks(), 1);
    CHECK(!is_locked(0) && is_locked(1));
    tms_device_locks_release(locks(), 2);
    CHECK(!is_locked(1));
    tms_device_locks_release(locks(), 3); /* one unlock too many has no effect */
    tms_device_locks_retain(locks(), 0);  /* and a lock that is not held cannot be held again */
    CHECK(!is_locked(0) && !is_locked(1));
    CHECK(acquire(1) == TMS_OK && is_locked(0));
    tms_device_locks_release(locks(), 1);
    CHECK(!is_locked(0));
}

static void make_private_files(void) {
    struct stat found;
    umask(0);
    setenv("TMS_LOCK_DIR", below("made//"), 1);
    CHECK(acquire(1) == TMS_OK);
    CHECK(stat(below("made"), &found) == 0 && (found.st_mode & 07777) == 0700);
    DIR *stream = opendir(below("made"));
    CHECK(stream);
    for (const struct dirent *entry; (entry = readdir(stream));) {
        if (entry->d_name[0] == '.') continue;
        CHECK(strncmp(entry->d_name, "torch_memory_saver-GPU-", 23) == 0);
        CHECK(fstatat(dirfd(stream), entry->d_name, &found, 0) == 0 && (found.st_mode & 07777) == 0600);
    }
    closedir(stream);
}

static void leave_no_descriptor(void) {
    CHECK(acquire(3) == TMS_OK); /* the driver's own are open now */
    tms_device_locks_release(locks(), 3);
    int before = open_descriptors();
    CHECK(acquire(3) == TMS_OK);
    CHECK(open_descriptors() == before + 2);
    tms_device_locks_release(locks(), 3);
    CHECK(open_descriptors() == before);
}

static void exclude_another_process_until_it_lets_go(void) {
    holder_t holder = start_holder(1);
    CHECK(acquire(1) == TMS_DEVICE_LOCKED);
    CHECK(error.device == 0 && strstr(error.message, file_of(0)));
    CHECK(acquire(2) == TMS_OK); /* the other device is free */
    end_holder(&holder);
    CHECK(acquire(1) == TMS_OK);
}

static void exclude_another_process_until_it_is_killed(void) {
    holder_t holder = start_holder(3);
    CHECK(acquire(2) == TMS_DEVICE_LOCKED);
    CHECK(kill(holder.process, SIGKILL) == 0 && waitpid(holder.process, NULL, 0) == holder.process);
    CHECK(acquire(3) == TMS_OK);
}

static void take_all_or_none(void) {
    holder_t holder = start_holder(2);
    CHECK(acquire(3) == TMS_DEVICE_LOCKED);
    CHECK(error.device == 1);
    CHECK(!is_locked(0)); /* the first was taken and released */
    CHECK(acquire(1) == TMS_OK);
    CHECK(acquire(3) == TMS_DEVICE_LOCKED);
    tms_device_locks_release(locks(), 1);
    CHECK(!is_locked(0)); /* the failure has left no count */
    end_holder(&holder);
    CHECK(acquire(3) == TMS_OK);
}

static int32_t let_the_holder_go(void *argument) {
    holder_t *holder = argument;
    questions++;
    if (holder->process) end_holder(holder);
    return 0;
}

static int32_t stop(void *argument) {
    (void)argument;
    questions++;
    return 1;
}

static void wait_until_the_other_lets_go(void) {
    tms_wait_t wait;
    holder_t holder = start_holder(1);
    tms_wait_begin(&wait, let_the_holder_go, &holder, INFINITY);
    CHECK(tms_device_locks_acquire(locks(), 3, &wait, &context, &error) == TMS_OK);
    CHECK(questions > 0 && holder.process == 0);
    CHECK(is_locked(0) && is_locked(1));
}

static void stop_waiting_when_told_to(void) {
    tms_wait_t wait;
    holder_t holder = start_holder(1);
    tms_wait_begin(&wait, stop, NULL, INFINITY);
    CHECK(tms_device_locks_acquire(locks(), 3, &wait, &context, &error) == TMS_INTERRUPTED);
    CHECK(questions == 1 && !is_locked(1));
    end_holder(&holder);
    CHECK(!is_locked(0));
}

static void stop_waiting_when_time_is_up(void) {
    tms_wait_t wait;
    holder_t holder = start_holder(1);
    tms_wait_begin(&wait, NULL, NULL, 0.01);
    CHECK(tms_device_locks_acquire(locks(), 3, &wait, &context, &error) == TMS_DEVICE_LOCKED);
    const char *waited_text = strstr(error.message, "waited ");
    double waited = waited_text ? strtod(waited_text + strlen("waited "), NULL) : 0;
    CHECK(waited >= 0.01 && waited <= tms_wait_elapsed(&wait) + 0.001); /* it is rounded to milliseconds */
    end_holder(&holder);
}

/* The parent's lock outlives a child that ends, and a child does not keep it beyond the parent's end. */
static void belong_to_the_parent(void) {
    int ready[2], kept[2];
    char byte = 0;
    CHECK(pipe(ready) == 0 && pipe(kept) == 0);
    pid_t owner = fork();
    CHECK(owner >= 0);
    if (owner == 0) {
        CHECK(acquire(3) == TMS_OK);
        pid_t ended = fork(); /* the handlers of process.c run */
        if (ended == 0) _exit(locks()->device[0].count == 0 && locks()->device[0].fd < 0 ? 0 : 1);
        int status = -1;
        CHECK(waitpid(ended, &status, 0) == ended && status == 0);
        CHECK(is_locked(0) && is_locked(1));
        tms_device_locks_release(locks(), 2);
        if (fork() == 0) {
            /* Outlives its parent, with no copy of the descriptor. */
            CHECK(write(ready[1], "r", 1) == 1);
            close(kept[1]);
            _exit(read(kept[0], &byte, 1) == 0 ? 0 : 1);
        }
        CHECK(is_locked(0) && !is_locked(1));
        pause();
        _exit(1);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK(is_locked(0));
    CHECK(kill(owner, SIGKILL) == 0 && waitpid(owner, NULL, 0) == owner);
    CHECK(!is_locked(0));
    close(kept[1]); /* ends the grandchild */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        LOCKS(count_per_device),
        LOCKS(make_private_files),
        LOCKS(leave_no_descriptor),
        LOCKS(exclude_another_process_until_it_lets_go),
        LOCKS(exclude_another_process_until_it_is_killed),
        LOCKS(take_all_or_none),
        LOCKS(wait_until_the_other_lets_go),
        LOCKS(stop_waiting_when_told_to),
        LOCKS(stop_waiting_when_time_is_up),
        LOCKS(belong_to_the_parent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
