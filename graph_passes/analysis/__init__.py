"""Facts about a graph, each found once: the order it runs in, what is alive when, what is forward and backward."""
