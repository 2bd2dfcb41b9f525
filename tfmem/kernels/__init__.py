"""Kernels for the recurrent, product and fusion passes: chosen, compiled and cached for a device."""
