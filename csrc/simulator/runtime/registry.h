/* Kernels that a program's CUDA code registers, by the address of their host function. The registry has its own lock and
 * needs no other state. */
#ifndef TMS_SIM_RUNTIME_REGISTRY_H
#define TMS_SIM_RUNTIME_REGISTRY_H

/* The mangled name of a registered function, or NULL. Valid until its library unregisters it. */
const char *sim_kernel_registered(const void *function);

#endif
