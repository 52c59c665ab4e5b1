"""What a pool, its key, a frame and a selection of tags are."""
