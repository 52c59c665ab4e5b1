/* Captures under way: what is submitted becomes part of a graph, and what is forbidden during them invalidates them.
 * Owns sim_state.captures. Called with the simulator's lock held. */
#ifndef TMS_SIM_WORK_CAPTURE_H
#define TMS_SIM_WORK_CAPTURE_H

#include "simulator/base/state.h"

/* Whether the call is forbidden by a capture under way; then that capture is invalidated. */
CUresult sim_capture_check_unsafe(void);
CUresult sim_capture_check_context(const sim_context_t *context);
CUresult sim_capture_check_legacy(const sim_context_t *context, bool query);
CUresult sim_capture_check_stream(sim_stream_t *stream); /* synchronising or querying it */

/* Begins one with this stream, which has none, into a graph of the program or, for NULL, a new one. */
CUresult sim_capture_start(sim_stream_t *stream, sim_graph_t *graph, CUstreamCaptureMode mode);
void sim_capture_join(sim_capture_t *capture, sim_stream_t *stream);
CUresult sim_capture_record(sim_stream_t *stream, const sim_op_t *op);
CUstreamCaptureStatus sim_capture_state(const sim_stream_t *stream);
/* Takes all streams out of a capture; true if none had done work that nothing waits for. */
bool sim_capture_release_streams(const sim_capture_t *capture);
/* Forgets a capture, in which no stream is any more; its graph stays. */
void sim_capture_remove(sim_capture_t *capture);
void sim_capture_forget(sim_stream_t *stream); /* the stream is destroyed */
void sim_capture_clear(void);

#endif
