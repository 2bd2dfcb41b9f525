"""Which ops of a step treat the examples of a batch one by one."""
