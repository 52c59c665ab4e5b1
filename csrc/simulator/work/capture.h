/* Active captures. Submitted work becomes part of a graph, and a forbidden call invalidates the capture. Owns
 * sim_state.captures. Called with the simulator's lock held. */
#ifndef TMS_SIM_WORK_CAPTURE_H
#define TMS_SIM_WORK_CAPTURE_H

#include "simulator/base/simulation.h"

/* Fails with CUDA_ERROR_STREAM_CAPTURE_* if an active capture forbids the call, and then invalidates that capture. */
CUresult sim_capture_check_unsafe(void);
CUresult sim_capture_check_context(const sim_context_t *context);
CUresult sim_capture_check_legacy(const sim_context_t *context, bool query);
CUresult sim_capture_check_stream(sim_stream_t *stream); /* for synchronising or querying the stream */

/* Begins a capture on this stream, which must not be capturing. NULL for `graph` creates a new graph. */
CUresult sim_capture_start(sim_stream_t *stream, sim_graph_t *graph, CUstreamCaptureMode mode);
void sim_capture_join(sim_capture_t *capture, sim_stream_t *stream);
CUresult sim_capture_record(sim_stream_t *stream, const sim_op_t *op);
CUstreamCaptureStatus sim_capture_state(const sim_stream_t *stream);
/* Detaches all streams from a capture. True if no stream had unjoined work. */
bool sim_capture_release_streams(const sim_capture_t *capture);
/* Frees a capture that has no more streams. Keeps its graph. */
void sim_capture_remove(sim_capture_t *capture);
void sim_capture_detach(sim_stream_t *stream); /* detaches a stream that is being destroyed */
void sim_capture_clear(void);

#endif
