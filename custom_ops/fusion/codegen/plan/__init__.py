"""Plans a kernel of a fused op: its loop nests, tiles, threads, registers and shared memory."""
