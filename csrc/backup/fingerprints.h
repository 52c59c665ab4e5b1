/* The fingerprints of a backup (include/tms_fingerprint.h), which show what has changed in the segment since it was saved.
 *
 * They belong to a layout of contents (content.h): one for each chunk of at most TMS_FINGERPRINT_CHUNK_BYTES of each extent.
 * A backup has `kept` ones, of the contents that it holds, and during a pause `fresh` ones, of the contents now. After the
 * pause the fresh ones are kept. The kept ones are valid only while the backup is `saved`: a backup that was overwritten in
 * part has no contents, and the next pause copies all of it.
 *
 * Fingerprints of different keys (device/fingerprinter.h) say nothing about each other, so each list has the number of its
 * key. A key that a module has drawn for itself needs no number: its fingerprints equal those of another such key only by
 * chance, which is as improbable as it is for different contents. So everything is copied.
 *
 * Owned by the backup; no lock. */
#ifndef TMS_BACKUP_FINGERPRINTS_H
#define TMS_BACKUP_FINGERPRINTS_H

#include "backup/content.h"
#include "include/tms_fingerprint.h"

/* NULL: not known. */
typedef struct tms_fingerprints {
    tms_fingerprint_t *kept, *fresh;
    uint64_t kept_key, fresh_key; /* the number of keys that had been set when they were computed */
} tms_fingerprints_t;

/* The chunk of an extent that begins `done` bytes after its start. All chunks but the first begin at a multiple of a vector.
 */
tms_extent_t tms_fingerprints_chunk(const tms_extent_t *extent, uint64_t done);
/* The number of chunks of a content. */
uint64_t tms_fingerprints_count(const tms_backup_content_t *content);

/* The fresh ones become a copy of `values`, which have the key `key`. False if memory is short; then there are none. */
bool tms_fingerprints_renew(tms_fingerprints_t *fingerprints, const tms_fingerprint_t *values, uint64_t count, uint64_t key);
void tms_fingerprints_commit(tms_fingerprints_t *fingerprints); /* the fresh ones are kept from now on */
void tms_fingerprints_cancel(tms_fingerprints_t *fingerprints); /* forgets the fresh ones */
void tms_fingerprints_forget(tms_fingerprints_t *fingerprints); /* forgets all */
/* Whether the kept and the fresh ones, of one layout, are known and can be compared. */
bool tms_fingerprints_are_comparable(const tms_fingerprints_t *fingerprints);

/* Fills *changed with the part of `content` that must be copied: whole blocks of `block` bytes of the backup, in which a
 * fingerprint differs. Both fingerprints are known and belong to this layout. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_fingerprints_compare(const tms_fingerprints_t *fingerprints, const tms_backup_content_t *content,
                                      uint64_t block, tms_backup_content_t *changed, const tms_error_context_t *context,
                                      tms_error_t *error);

#endif
