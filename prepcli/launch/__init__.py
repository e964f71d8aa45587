"""Start a command in several processes: on SLURM, PBS, TPUs, Kubernetes, SkyPilot and Ray, or on this machine."""
