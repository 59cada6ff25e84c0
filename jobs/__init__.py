"""The same command on someone else's machines. Nothing yet: HF Jobs, Slurm and Ray come here."""
