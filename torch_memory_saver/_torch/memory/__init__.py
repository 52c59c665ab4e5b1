"""Release memory at pauses, resumes, ends of regions and empty_cache(), and list live blocks."""
