"""The fusion pass over what was captured: what it needs of a device, and whether its result is the faster one."""
