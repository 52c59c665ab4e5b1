/* Published names: the directory names/NAME of the folder, with links to objects that no process owns, and a manifest.
 *
 * The directory is made in the holder of the publisher, complete, and renamed to names/NAME. If the name exists, the two
 * directories are exchanged by one call, and the old one is removed. So a process that is killed at any point leaves the old
 * name, the new one or none. The rest lies in its holder and is removed with it.
 *
 * A removal of a name begins with the manifest. A directory without one is no name any more, and the next clean-up removes
 * the rest. So the objects of a name go only after its manifest.
 *
 * Makes no driver call. The caller has the store's lock, or is the only user. */
#ifndef TMS_SHARED_PUBLISHED_H
#define TMS_SHARED_PUBLISHED_H

#include "backup/shared/folder.h"

/* Gives the objects `name`, which is the name of a directory; another one of that name is replaced. The holder has links to
 * all of them; equal ones may be among them. The manifest is a JSON object: "objects" are the names of the objects, in this
 * order, and "contents" is `contents`, a JSON value. *left: a directory of the publication could not be removed from the
 * holder (tms_shared_folder_sweep). TMS_BACKUP_IO. After a failure the name is what it was before. */
tms_status_t tms_shared_publish(const tms_shared_folder_t *folder, const char *name, const tms_shared_name_t *objects,
                                size_t count, const char *contents, bool *left, const tms_error_context_t *context,
                                tms_error_t *error);

#endif
