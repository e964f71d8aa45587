"""Index algebra, chunk grids, plans and coverage proofs. Pure data and arithmetic."""
