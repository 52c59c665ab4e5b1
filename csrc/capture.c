#include "capture.h"

void tms_capture_init(tms_capture_t *capture) { atomic_init(&capture->visible, 0); }

tms_status_t tms_capture_begin(tms_capture_t *capture, const tms_region_t *region, const tms_error_context_t *context,
                               tms_error_t *error) {
    int depth = tms_capture_visible(capture);
    if (depth == TMS_CAPTURE_MAX_NESTED)
        return tms_error_set(error, TMS_INVALID_STATE, context, "%d stream captures are under way already; end one first",
                             depth);
    capture->settings[depth] = region ? *region : (tms_region_t){.managed = false};
    atomic_store(&capture->visible, depth + 1);
    return TMS_OK;
}

bool tms_capture_end(tms_capture_t *capture) {
    int depth = tms_capture_visible(capture);
    if (depth == 0) return false;
    atomic_store(&capture->visible, depth - 1);
    return true;
}

bool tms_capture_settings(const tms_capture_t *capture, tms_region_t *region) {
    for (int i = tms_capture_visible(capture); i-- > 0;) {
        if (!capture->settings[i].managed) continue;
        *region = capture->settings[i];
        return true;
    }
    return false;
}
