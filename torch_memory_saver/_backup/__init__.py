"""Host copies of paused tensors."""
