#include "core/model/region.h"

#include <string.h>

/* The stack of one thread. `owner` identifies its tms_region_defaults_t. A process has one, and tests have several. A thread
 * that meets another owner starts with an empty stack. */
typedef struct region_stack {
    const tms_region_defaults_t *owner;
    int depth;
    tms_region_t entry[TMS_REGION_MAX_DEPTH + 1]; /* [0]: the initial settings */
    uint64_t id[TMS_REGION_MAX_DEPTH + 1];        /* of each entry; [0]: 0 */
    /* An entry has ended once its tag's following_ended has reached this number. UINT64_MAX: it never ends. */
    uint64_t ended_from[TMS_REGION_MAX_DEPTH + 1];
} region_stack_t;

static _Thread_local region_stack_t thread_stack;

static const tms_error_context_t region_context = {.operation = "region", .device = TMS_NO_DEVICE};

/* Forgets a stack that belongs to these defaults, so that its stale tags are not used with others at the same address. */
static void forget_stack(const tms_region_defaults_t *defaults) {
    if (thread_stack.owner == defaults) thread_stack.owner = NULL;
}

tms_status_t tms_region_init(tms_region_defaults_t *defaults, const tms_config_t *config, tms_error_t *error) {
    tms_tag_t *tag = NULL;
    forget_stack(defaults);
    tms_tag_table_init(&defaults->tags);
    tms_status_t status = tms_tag_intern(&defaults->tags, TMS_DEFAULT_TAG, &tag, error);
    if (status != TMS_OK) {
        tms_tag_table_release(&defaults->tags);
        return status;
    }
    defaults->disabled = config->disable;
    defaults->own_handles = !config->runs;
    defaults->initial = (tms_region_t){.tag = tag,
                                       .backup = tms_config_init_backup(config),
                                       .own_handles = defaults->own_handles,
                                       .managed = config->init_enable};
    atomic_init(&defaults->last_id, 0);
    atomic_init(&defaults->left_on_other_thread_count, 0);
    for (int index = 0; index < TMS_REGION_LEFT_ON_OTHER_THREAD; index++)
        atomic_init(&defaults->left_on_other_thread[index], 0);
    return TMS_OK;
}

void tms_region_release(tms_region_defaults_t *defaults) {
    forget_stack(defaults);
    tms_tag_table_release(&defaults->tags);
}

static bool was_left_on_other_thread(const tms_region_defaults_t *defaults, uint64_t id) {
    const uint64_t count = atomic_load_explicit(&defaults->left_on_other_thread_count, memory_order_acquire);
    for (uint64_t index = 0; index < count && index < TMS_REGION_LEFT_ON_OTHER_THREAD; index++) {
        if (atomic_load(&defaults->left_on_other_thread[index]) == id) return true;
    }
    return false;
}

/* Innermost regions that another thread has left are removed. Those below a region of this thread are removed when that
 * region ends. */
static region_stack_t *stack_of_thread(const tms_region_defaults_t *defaults) {
    region_stack_t *stack = &thread_stack;
    if (__builtin_expect(stack->owner != defaults, 0)) {
        stack->owner = defaults;
        stack->depth = 0;
        stack->entry[0] = defaults->initial;
        stack->id[0] = 0;
        stack->ended_from[0] = UINT64_MAX;
    }
    while (stack->depth > 0 && was_left_on_other_thread(defaults, stack->id[stack->depth])) stack->depth--;
    return stack;
}

static bool is_backup_kind(int32_t number) {
    switch (number) {
#define CASE(kind, number, name) case TMS_BACKUP_##kind:
        TMS_BACKUP_KINDS(CASE)
#undef CASE
        return true;
    default: return false;
    }
}

tms_status_t tms_region_from_settings(tms_region_defaults_t *defaults, const tms_region_settings_t *settings,
                                      tms_region_t *region, tms_error_t *error) {
    if (!settings) return tms_error_set(error, TMS_INVALID_ARGUMENT, &region_context, "settings are required");
    if (!is_backup_kind(settings->backup)) {
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &region_context, "there is no backup kind %d",
                             (int)settings->backup);
    }
    if (settings->host_policy < TMS_HOST_DEFAULT || settings->host_policy > TMS_HOST_RETAIN) {
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &region_context, "there is no host memory policy %d",
                             (int)settings->host_policy);
    }
    tms_tag_t *tag = NULL;
    tms_status_t status = tms_tag_intern(&defaults->tags, settings->tag, &tag, error);
    if (status != TMS_OK) return status;
    *region = (tms_region_t){.tag = tag,
                             .backup = (tms_backup_kind_t)settings->backup,
                             .host_policy = (tms_host_policy_t)settings->host_policy,
                             .own_handles = settings->own_handles != 0 || defaults->own_handles,
                             .managed = settings->managed != 0 && !defaults->disabled};
    return TMS_OK;
}

static uint64_t new_number(tms_region_defaults_t *defaults) {
    return atomic_fetch_add_explicit(&defaults->last_id, 1, memory_order_relaxed) + 1;
}

tms_status_t tms_region_enter(tms_region_defaults_t *defaults, const tms_region_settings_t *settings, bool follows,
                              uint64_t *id, tms_error_t *error) {
    region_stack_t *stack = stack_of_thread(defaults);
    if (stack->depth == TMS_REGION_MAX_DEPTH) {
        return tms_error_set(error, TMS_INVALID_STATE, &region_context,
                             "this thread is in %d nested regions, the most there can be", stack->depth);
    }
    tms_region_t region;
    tms_status_t status = tms_region_from_settings(defaults, settings, &region, error);
    if (status != TMS_OK) return status;
    stack->entry[++stack->depth] = region;
    *id = stack->id[stack->depth] = new_number(defaults);
    stack->ended_from[stack->depth] = follows ? *id : UINT64_MAX;
    return TMS_OK;
}

/* An id that no region has had yet is a mistake of the caller's: the region that will have it has not ended. */
static void note_left_on_other_thread(tms_region_defaults_t *defaults, uint64_t id) {
    if (id == 0 || id > atomic_load_explicit(&defaults->last_id, memory_order_relaxed)) return;
    const uint64_t next = atomic_fetch_add(&defaults->left_on_other_thread_count, 1);
    atomic_store(&defaults->left_on_other_thread[next % TMS_REGION_LEFT_ON_OTHER_THREAD], id);
}

int tms_region_leave(tms_region_defaults_t *defaults, uint64_t id) {
    region_stack_t *stack = stack_of_thread(defaults);
    int index = stack->depth;
    while (index > 0 && stack->id[index] != id) index--;
    if (index == 0) {
        note_left_on_other_thread(defaults, id);
        return TMS_NO_SUCH_REGION;
    }
    int later = stack->depth - index;
    memmove(&stack->entry[index], &stack->entry[index + 1], (size_t)later * sizeof(stack->entry[0]));
    memmove(&stack->id[index], &stack->id[index + 1], (size_t)later * sizeof(stack->id[0]));
    memmove(&stack->ended_from[index], &stack->ended_from[index + 1], (size_t)later * sizeof(stack->ended_from[0]));
    stack->depth--;
    return later;
}

/* Entry 0, the initial settings, never ends. */
static bool has_ended(const region_stack_t *stack, int index) {
    return stack->ended_from[index] <= atomic_load_explicit(&stack->entry[index].tag->following_ended, memory_order_acquire);
}

/* Every number is taken from that of the ids, so it ends the regions that were entered before, and none that is entered
 * later. Regions of this thread stay: they are as if they had been entered now. */
void tms_region_end_following(tms_region_defaults_t *defaults, const char *name) {
    tms_tag_t *tag = tms_tag_find(&defaults->tags, name);
    if (!tag) return;
    region_stack_t *stack = stack_of_thread(defaults);
    const uint64_t now = new_number(defaults);
    for (int index = 1; index <= stack->depth; index++) {
        if (stack->entry[index].tag == tag && stack->ended_from[index] < now && !has_ended(stack, index))
            stack->ended_from[index] = now + 1;
    }
    uint64_t ended = atomic_load(&tag->following_ended);
    while (ended < now && !atomic_compare_exchange_weak(&tag->following_ended, &ended, now)) continue;
}

tms_region_t tms_region_current(tms_region_defaults_t *defaults, int *depth) {
    const region_stack_t *stack = stack_of_thread(defaults);
    int index = stack->depth;
    while (has_ended(stack, index)) index--;
    if (depth) *depth = stack->depth;
    return stack->entry[index];
}

tms_status_t tms_region_set(tms_region_defaults_t *defaults, const tms_region_settings_t *settings, tms_error_t *error) {
    region_stack_t *stack = stack_of_thread(defaults);
    const int index = stack->depth;
    tms_status_t status = tms_region_from_settings(defaults, settings, &stack->entry[index], error);
    /* The new settings are in force even if the region, which follows its tag, has been ended. */
    if (status == TMS_OK && stack->ended_from[index] != UINT64_MAX) stack->ended_from[index] = new_number(defaults);
    return status;
}
