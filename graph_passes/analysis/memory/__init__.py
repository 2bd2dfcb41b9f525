"""Facts about a step's memory: what is alive when, what a plan makes of it, what room the allocator finds."""
