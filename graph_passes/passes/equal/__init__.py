"""Numbers that several ops compute alike are computed once in a step under a budget."""
