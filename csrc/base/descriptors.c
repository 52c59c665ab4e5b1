#include "base/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { BITS = 64 };

tms_status_t tms_descriptors_init(tms_descriptors_t *descriptors, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *descriptors = (tms_descriptors_t){.count = 0};
    int os_error = pthread_mutex_init(&descriptors->lock, NULL);
    /* The only possible cause is a lack of memory. */
    return os_error == 0 ? TMS_OK : tms_error_set_os(error, &context, "pthread_mutex_init", ENOMEM, NULL);
}

static void close_all(tms_descriptors_t *descriptors) {
    for (int i = 0; i < descriptors->count; i++)
        if (descriptors->open[i / BITS] >> i % BITS & 1) (void)close(descriptors->first + i);
    memset(descriptors->open, 0, sizeof descriptors->open);
}

void tms_descriptors_release(tms_descriptors_t *descriptors) {
    close_all(descriptors);
    pthread_mutex_destroy(&descriptors->lock);
}

void tms_descriptors_after_fork_in_child(tms_descriptors_t *descriptors) {
    (void)pthread_mutex_init(&descriptors->lock, NULL); /* cannot fail: it succeeded on this memory before */
    close_all(descriptors);
}

/* Chooses the upper half of the numbers that the process may use, if these are few. Otherwise the window starts at a number
 * that few programs reach. A higher start would only enlarge the kernel's table of files. */
static void choose_window(tms_descriptors_t *descriptors) {
    struct rlimit limit = {.rlim_cur = 0};
    (void)getrlimit(RLIMIT_NOFILE, &limit); /* cannot fail with these arguments */
    rlim_t half = limit.rlim_cur / 2;
    descriptors->first = half < TMS_DESCRIPTORS_LOWEST ? (int)half : TMS_DESCRIPTORS_LOWEST;
    rlim_t above = limit.rlim_cur - (rlim_t)descriptors->first;
    descriptors->count = above < TMS_MAX_DESCRIPTORS ? (int)above : TMS_MAX_DESCRIPTORS;
    descriptors->next = descriptors->first;
}

/* Duplicates `given` to the first free number from `from` to the end of the window. Returns -1 and sets errno if there is
 * none. */
static int duplicate(const tms_descriptors_t *descriptors, int given, int from) {
    int number = fcntl(given, F_DUPFD_CLOEXEC, from);
    if (number < descriptors->first + descriptors->count) return number;
    (void)close(number); /* beyond the window: the limit was raised since it was chosen */
    errno = EMFILE;
    return -1;
}

tms_status_t tms_descriptors_adopt(tms_descriptors_t *descriptors, int given, tms_descriptor_t *adopted,
                                   const tms_error_context_t *context, tms_error_t *error) {
    pthread_mutex_lock(&descriptors->lock);
    if (descriptors->count == 0) choose_window(descriptors);
    int number = duplicate(descriptors, given, descriptors->next);
    if (number < 0) number = duplicate(descriptors, given, descriptors->first);
    if (number >= 0) {
        int i = number - descriptors->first;
        descriptors->open[i / BITS] |= (uint64_t)1 << i % BITS;
        descriptors->next = number + 1;
        *adopted = (tms_descriptor_t){.among = descriptors, .number = number};
    }
    int os_error = errno, count = descriptors->count;
    pthread_mutex_unlock(&descriptors->lock);
    (void)close(given);
    if (number >= 0) return TMS_OK;
    tms_error_set_system(error, TMS_INVALID_STATE, context, "fcntl", os_error, NULL);
    tms_error_append(error,
                     " Each allocation that is shared with other processes needs a file descriptor until it is paused or "
                     "freed, and this process may use %d of them for that. Raise the limit of open files (ulimit -n) before "
                     "the process starts, or pause some of these allocations first.",
                     count);
    return TMS_INVALID_STATE;
}

void tms_descriptor_close(tms_descriptor_t *descriptor) {
    tms_descriptors_t *among = descriptor->among;
    if (!among) return;
    pthread_mutex_lock(&among->lock);
    int i = descriptor->number - among->first;
    among->open[i / BITS] &= ~((uint64_t)1 << i % BITS);
    (void)close(descriptor->number);
    pthread_mutex_unlock(&among->lock);
    *descriptor = (tms_descriptor_t){.among = NULL};
}
