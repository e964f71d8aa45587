"""Files on a disk, on the hub and in buckets: opened, listed, read by ranges and replaced, with untrusted names."""
