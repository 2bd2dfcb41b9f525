"""Times candidates against each other, and remembers what came of it: one service for kernels, steps and nets."""
