"""Start a command in several processes: files for SLURM, TPUs, Kubernetes, SkyPilot and Ray, and local processes."""
