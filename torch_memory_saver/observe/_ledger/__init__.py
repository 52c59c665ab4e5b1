"""The ledger: who holds the memory of a device. ``sources`` takes it."""
