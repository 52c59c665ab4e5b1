/* The functions of the table for the shared page of this process (base/shared_page.h). No driver call. */

#include "abi/entries.h"

#include <string.h>

#include "abi/start.h"

void tms_api_set_page_role(const char *name, int32_t rank_known, int64_t rank, int32_t serves) {
    tms_state_t *state = tms_state(NULL);
    tms_shared_page_role_t role = {
        .rank_known = rank_known != 0, .rank = rank_known ? (uint64_t)rank : 0, .serves = serves != 0};
    if (!state) return;
    if (name) tms_shared_page_copy_text(role.name, name);
    pthread_mutex_lock(&state->saver.lock);
    tms_shared_page_set_role(&state->saver.shared_page, &role);
    pthread_mutex_unlock(&state->saver.lock);
}

uint64_t tms_api_page_requests(void) {
    tms_state_t *state = tms_state_if_made();
    return state ? tms_shared_page_requests(&state->saver.shared_page) : 0;
}

void tms_api_page_serve(uint32_t kind, int32_t served, int32_t os_error) {
    tms_state_t *state = tms_state_if_made();
    if (state) tms_shared_page_serve(&state->saver.shared_page, kind, served != 0, os_error);
}

const char *tms_api_page_path(void) {
    tms_state_t *state = tms_state_if_made();
    return state && tms_shared_page_is_open(&state->saver.shared_page) ? state->saver.shared_page.file.path : "";
}

int32_t tms_api_page_directory(char *path, size_t room) {
    char whole[PATH_MAX];
    tms_state_t *state = tms_state(NULL);
    if (!state) return 0;
    const tms_directory_choice_t place = tms_shared_page_directory(state->config.shared_page_directory);
    if (!tms_directory_path(&place, whole) || strlen(whole) >= room) return 0;
    memcpy(path, whole, strlen(whole) + 1);
    return 1;
}
