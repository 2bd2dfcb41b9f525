"""Bazel's test of the library it built: the running TensorFlow loads it, and one MemOp answers."""

import sys

import tensorflow as tf

if __name__ == "__main__":
    ops = tf.load_op_library(sys.argv[1])
    with tf.device("CPU:0"):
        print(ops.mem_op_stats(reset=False))
