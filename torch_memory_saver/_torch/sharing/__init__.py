"""Memory that is sent to other processes."""
