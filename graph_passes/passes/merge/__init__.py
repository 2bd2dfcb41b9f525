"""Joins products of one operand into one larger product where cuBLASLt is timed to be faster."""
