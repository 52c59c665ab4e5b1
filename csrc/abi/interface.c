#include "abi/interface.h"

#ifndef TMS_INTERFACE
#define TMS_INTERFACE 0
#endif

uint32_t tms_interface(void) { return TMS_INTERFACE; }
