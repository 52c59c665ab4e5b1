"""What gives memory back at pauses, resumes, ends of regions and empty_cache(), and what lists live blocks."""
