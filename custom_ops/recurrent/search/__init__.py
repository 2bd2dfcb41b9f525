"""The configurations of a recurrent kernel: how fast each should be, and how fast it is."""
