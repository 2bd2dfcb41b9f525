"""Stitches memory-intensive ops into fused ops: partition, lowering, edit."""
