"""The recurrent pass over a captured graph, and the choice of its kernels."""
