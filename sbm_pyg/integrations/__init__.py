"""What the library adds to others: each of these is imported by the module of its name only."""
