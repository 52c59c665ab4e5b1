"""Which pools serve which thread, as regions are entered and left."""
