"""Whether the CPU has AVX-512, with which the bounds of some tests were found.

TensorFlow's sums are rounded otherwise without it. On an AMD EPYC with AVX2 a float32 gradient of a loop, bfloat16
products and a loss in bfloat16 differed from tfmem's by more than these bounds.
"""

from tfmem.devices import cpu_instructions

AVX512 = "avx512f" in cpu_instructions()
