"""The program's tensors: where they lie, what manage() moves, what preserve() keeps, and what check_fresh() finds."""
