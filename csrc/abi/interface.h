/* The one number of the interface between the Python files, the extension and a preload library. */
#ifndef TMS_INTERFACE_H
#define TMS_INTERFACE_H

#include <stdint.h>

/* The CRC-32 of the _core.pyi that this library was built with (setup.interface). That file has a checksum of csrc/include,
 * so the number differs if the function table does. It is 0 if the build did not pass it. */
uint32_t tms_interface(void);

#endif
