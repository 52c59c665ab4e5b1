"""NCCL's communicators, process groups and symmetric memory."""
