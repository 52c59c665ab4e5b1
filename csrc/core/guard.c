#include "core/guard.h"

#include <stddef.h>

tms_segment_t *tms_guard_hold(tms_guard_t *guard, int device) {
    if (guard->of[device].page) guard->of[device].references++;
    return guard->of[device].page;
}

void tms_guard_install(tms_guard_t *guard, tms_segment_t *page) {
    guard->of[page->device].page = page;
    guard->of[page->device].references = 1;
}

tms_segment_t *tms_guard_drop(tms_guard_t *guard, int device) {
    tms_segment_t *page = guard->of[device].page;
    if (--guard->of[device].references > 0) return NULL;
    guard->of[device].page = NULL;
    return page;
}
