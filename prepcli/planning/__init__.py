"""Plan conversions: index algebra, chunk grids, slabs, plans and coverage checks. Pure data and arithmetic."""
