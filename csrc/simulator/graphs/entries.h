/* Entry points of captures and graphs, in the format of base/entry_list.h. Implemented in capture_calls.c
 * and graph_calls.c. */
#ifndef TMS_SIM_GRAPHS_ENTRIES_H
#define TMS_SIM_GRAPHS_ENTRIES_H

#include "simulator/base/entry_list.h"

#define SIM_GRAPHS_DRIVER_ENTRIES(X)                                                                                        \
    X(cuThreadExchangeStreamCaptureMode, sim_capture_exchange_mode, SIM_INIT | SIM_FORKED, (CUstreamCaptureMode * mode),    \
      (mode))                                                                                                               \
    X(cuStreamIsCapturing, sim_capture_status, SIM_CONTEXT, (CUstream stream, CUstreamCaptureStatus * status),              \
      (stream, status))                                                                                                     \
    X(cuStreamBeginCapture_v2, sim_capture_begin, SIM_CONTEXT, (CUstream stream, CUstreamCaptureMode mode), (stream, mode)) \
    X(cuStreamEndCapture, sim_capture_end, SIM_CONTEXT, (CUstream stream, CUgraph * graph), (stream, graph))                \
    X(cuGraphCreate, sim_graph_create, SIM_INIT, (CUgraph * graph, unsigned int flags), (graph, flags))                     \
    X(cuGraphDestroy, sim_graph_destroy, SIM_INIT, (CUgraph graph), (graph))                                                \
    X(cuGraphInstantiateWithFlags, sim_graph_instantiate, SIM_CONTEXT,                                                      \
      (CUgraphExec * executable, CUgraph graph, unsigned long long flags), (executable, graph, flags))                      \
    X(cuGraphExecDestroy, sim_graph_destroy_executable, SIM_INIT | SIM_UNSAFE, (CUgraphExec executable), (executable))      \
    X(cuGraphLaunch, sim_graph_launch, SIM_CONTEXT, (CUgraphExec executable, CUstream stream), (executable, stream))        \
    X(cuStreamGetCaptureInfo_v2, sim_capture_info_2, SIM_CONTEXT,                                                           \
      (CUstream stream, CUstreamCaptureStatus * status, cuuint64_t * id, CUgraph * graph, const CUgraphNode **dependencies, \
       size_t *count),                                                                                                      \
      (stream, status, id, graph, dependencies, count))                                                                     \
    X(cuGraphGetNodes, sim_graph_nodes, SIM_INIT, (CUgraph graph, CUgraphNode * nodes, size_t *count),                      \
      (graph, nodes, count))                                                                                                \
    X(cuGraphNodeGetType, sim_graph_node_type, SIM_INIT, (CUgraphNode node, CUgraphNodeType * type), (node, type))

#define SIM_GRAPHS_RUNTIME_ENTRIES(X)                                                                                       \
    X(cudaStreamBeginCapture, sim_capture_begin, SIM_RUNTIME, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))  \
    X(cudaStreamBeginCapture_ptsz, sim_capture_begin, SIM_RUNTIME, (CUstream stream, CUstreamCaptureMode mode),             \
      (stream, mode))                                                                                                       \
    X(cudaStreamBeginCaptureToGraph, sim_capture_begin_to_graph, SIM_RUNTIME,                                               \
      (CUstream stream, CUgraph graph, const void *dependencies, const void *edges, size_t count,                           \
       CUstreamCaptureMode mode),                                                                                           \
      (stream, graph, dependencies, edges, count, mode))                                                                    \
    X(cudaStreamBeginCaptureToGraph_ptsz, sim_capture_begin_to_graph, SIM_RUNTIME,                                          \
      (CUstream stream, CUgraph graph, const void *dependencies, const void *edges, size_t count,                           \
       CUstreamCaptureMode mode),                                                                                           \
      (stream, graph, dependencies, edges, count, mode))                                                                    \
    X(cudaStreamEndCapture, sim_capture_end, SIM_RUNTIME, (CUstream stream, CUgraph * graph), (stream, graph))              \
    X(cudaStreamEndCapture_ptsz, sim_capture_end, SIM_RUNTIME, (CUstream stream, CUgraph * graph), (stream, graph))         \
    X(cudaStreamIsCapturing, sim_capture_status, SIM_RUNTIME, (CUstream stream, CUstreamCaptureStatus * status),            \
      (stream, status))                                                                                                     \
    X(cudaThreadExchangeStreamCaptureMode, sim_capture_exchange_mode, SIM_DEVICES, (CUstreamCaptureMode * mode), (mode))    \
    X(cudaGraphCreate, sim_graph_create, SIM_DEVICES, (CUgraph * graph, unsigned int flags), (graph, flags))                \
    X(cudaGraphDestroy, sim_graph_destroy, SIM_DEVICES, (CUgraph graph), (graph))                                           \
    X(cudaGraphInstantiate, sim_graph_instantiate, SIM_RUNTIME,                                                             \
      (CUgraphExec * executable, CUgraph graph, unsigned long long flags), (executable, graph, flags))                      \
    X(cudaGraphExecDestroy, sim_graph_destroy_executable, SIM_DEVICES | SIM_UNSAFE, (CUgraphExec executable), (executable)) \
    X(cudaGraphLaunch, sim_graph_launch, SIM_RUNTIME, (CUgraphExec executable, CUstream stream), (executable, stream))      \
    X(cudaStreamGetCaptureInfo, sim_capture_info, SIM_RUNTIME,                                                              \
      (CUstream stream, CUstreamCaptureStatus * status, cuuint64_t * id, CUgraph * graph, const CUgraphNode **dependencies, \
       const void **edges, size_t *count),                                                                                  \
      (stream, status, id, graph, dependencies, edges, count))                                                              \
    X(cudaStreamGetCaptureInfo_v2, sim_capture_info_2, SIM_RUNTIME,                                                         \
      (CUstream stream, CUstreamCaptureStatus * status, cuuint64_t * id, CUgraph * graph, const CUgraphNode **dependencies, \
       size_t *count),                                                                                                      \
      (stream, status, id, graph, dependencies, count))                                                                     \
    X(cudaStreamGetCaptureInfo_v3, sim_capture_info, SIM_RUNTIME,                                                           \
      (CUstream stream, CUstreamCaptureStatus * status, cuuint64_t * id, CUgraph * graph, const CUgraphNode **dependencies, \
       const void **edges, size_t *count),                                                                                  \
      (stream, status, id, graph, dependencies, edges, count))                                                              \
    X(cudaStreamUpdateCaptureDependencies, sim_runtime_capture_update, SIM_RUNTIME,                                         \
      (CUstream stream, CUgraphNode * nodes, const void *edges, size_t count, unsigned int flags),                          \
      (stream, nodes, edges, count, flags))                                                                                 \
    X(cudaStreamUpdateCaptureDependencies_v2, sim_capture_update, SIM_RUNTIME,                                              \
      (CUstream stream, CUgraphNode * nodes, const void *edges, size_t count, unsigned int flags),                          \
      (stream, nodes, edges, count, flags))                                                                                 \
    X(cudaGraphInstantiateWithFlags, sim_graph_instantiate, SIM_RUNTIME,                                                    \
      (CUgraphExec * executable, CUgraph graph, unsigned long long flags), (executable, graph, flags))                      \
    X(cudaGraphUpload, sim_graph_upload, SIM_RUNTIME, (CUgraphExec executable, CUstream stream), (executable, stream))      \
    X(cudaGraphGetNodes, sim_graph_nodes, SIM_DEVICES, (CUgraph graph, CUgraphNode * nodes, size_t *count),                 \
      (graph, nodes, count))                                                                                                \
    X(cudaGraphNodeGetDependencies, sim_graph_dependencies, SIM_DEVICES,                                                    \
      (CUgraphNode node, CUgraphNode * nodes, void *edges, size_t *count), (node, nodes, edges, count))                     \
    X(cudaGraphDebugDotPrint, sim_graph_print, SIM_DEVICES, (CUgraph graph, const char *path, unsigned int flags),          \
      (graph, path, flags))

SIM_GRAPHS_DRIVER_ENTRIES(SIM_DECLARE_ENTRY)
SIM_GRAPHS_RUNTIME_ENTRIES(SIM_DECLARE_ENTRY)

#endif
