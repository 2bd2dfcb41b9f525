"""Reads and rebuilds functions and graphs of TensorFlow; what its public interface does not give is reached here."""
