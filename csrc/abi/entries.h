/* The bodies of the table's functions (tms_api.def). Any thread may call them, and each gets the state of the process. They
 * are in api.c, in queries.c (what is managed, events) and in shared_page.c. */
#ifndef TMS_ENTRIES_H
#define TMS_ENTRIES_H

#include "include/tms.h"

#define TMS_C_FUNCTION(result, name, parameters) result tms_api_##name parameters;
#include "include/tms_api.def"

#endif
