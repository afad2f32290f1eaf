"""Files that start a planned run, a module for each way: torchrun, DeepSpeed, SLURM, Kubernetes.

Each has FILES, the names that it writes, and `files(job)`, their texts by name. Nothing is written here.
"""
