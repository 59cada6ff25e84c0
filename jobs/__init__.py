"""The same command on someone else's machines: Hugging Face Jobs, and SLURM clusters.

Owns what such a service is sent, how it is followed and ended, and where copies of a run are kept so that another
machine can go on with it. Knows nothing of a run's contents; imports nothing of ours. Called by the command line and
by the process that `harness-trainer launch inside` (on SLURM `inside-slurm`) is in a job.
"""
