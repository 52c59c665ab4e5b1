"""Choose the pools that serve each thread, as regions are entered and left."""
