"""The ten workloads of FusionStitching (arXiv:1911.11576, Table 1) as steps of TensorFlow 2."""
