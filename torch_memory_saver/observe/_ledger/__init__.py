"""The ledger, which lists who holds the memory of a device. ``sources`` takes it."""
