"""TensorFlow ops in C++ and what loads them. Knows no graphs and makes no decisions."""
