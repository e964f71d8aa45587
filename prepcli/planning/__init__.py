"""Plan conversions: arrays, leaves, chunk placement, slabs, units of work and coverage checks. Pure data."""
