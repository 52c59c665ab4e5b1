/* A CUDA runtime without a GPU behind it: allocations fail, captures succeed. */

int cudaMalloc(void **address, unsigned long bytes);
int cudaFree(void *address);
int cudaStreamBeginCapture_ptsz(void *stream, int mode);
int cudaStreamEndCapture_ptsz(void *stream, void **graph);

int cudaMalloc(void **address, unsigned long bytes) {
    (void)address;
    (void)bytes;
    return 999;
}

int cudaFree(void *address) {
    (void)address;
    return 999;
}

int cudaStreamBeginCapture_ptsz(void *stream, int mode) {
    (void)stream;
    (void)mode;
    return 0;
}

int cudaStreamEndCapture_ptsz(void *stream, void **graph) {
    (void)stream;
    *graph = graph;
    return 0;
}
