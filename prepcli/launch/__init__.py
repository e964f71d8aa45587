"""Start one training in several processes: scripts for SLURM, Cloud TPUs and Kubernetes, and local processes."""
