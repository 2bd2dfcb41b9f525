"""What holds for a graph, whatever a pass does with it: memory, cost, dependences, op patterns, device support."""
