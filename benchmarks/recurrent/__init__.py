"""Recurrent layers against cuDNN and others."""
