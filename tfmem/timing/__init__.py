"""Times candidates against each other and remembers the choice."""
