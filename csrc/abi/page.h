/* The functions of the table for the shared page of this process (base/shared_page.h). Any thread; no driver call. */
#ifndef TMS_PAGE_H
#define TMS_PAGE_H

#include "include/tms.h"

void tms_page_role(const char *name, int32_t rank_known, int64_t rank, int32_t serves);
uint64_t tms_page_requests(void);
void tms_page_serve(uint32_t kind, int32_t served, int32_t os_error);
const char *tms_page_path(void);
int32_t tms_page_directory(char *path, size_t room);

#endif
