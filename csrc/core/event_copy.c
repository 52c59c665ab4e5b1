#include "core/event_copy.h"

/* Adds what a segment holds to the last row, if that has its tag and device, else to a new one. */
static void add(tms_events_copy_t *copy, const tms_segment_t *segment, const tms_tag_t **tag, int *device) {
    if (copy->level_count == 0 || *tag != segment->tag || *device != segment->device) {
        *tag = segment->tag;
        *device = segment->device;
        if (copy->level_count++ < copy->level_room)
            copy->levels[copy->level_count - 1] = (tms_event_level_t){.tag = segment->tag->name, .device = segment->device};
    }
    if (copy->level_count > copy->level_room) return;
    tms_footprint_t *holds = &copy->levels[copy->level_count - 1].holds;
    holds->resident_bytes += segment->told.holds.resident_bytes;
    holds->paused_bytes += segment->told.holds.paused_bytes;
    holds->backup_bytes += segment->told.holds.backup_bytes;
}

void tms_saver_copy_events(tms_saver_t *saver, tms_events_copy_t *copy) {
    const tms_tag_t *tag = NULL;
    int device = TMS_NO_DEVICE;
    copy->level_count = 0;
    copy->capacity = saver->events.capacity;
    pthread_mutex_lock(&saver->lock);
    copy->event_count = tms_events_copy(&saver->events, copy->events, copy->event_room, &copy->recorded);
    /* A forked child holds nothing of its parent's. */
    bool holds = tms_events_are_on(&saver->events) && !atomic_load(&saver->forked);
    for (tms_registry_node_t *node = holds ? saver->registry.first : NULL; node; node = node->next)
        add(copy, tms_segment_of(node), &tag, &device);
    pthread_mutex_unlock(&saver->lock);
}
