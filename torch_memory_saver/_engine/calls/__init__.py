"""The calls of pause and resume: hooks around them, their turns, resumes in the background, and warnings."""
