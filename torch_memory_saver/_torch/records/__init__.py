"""Records: pools, the keys of pools, frames and selections of tags."""
