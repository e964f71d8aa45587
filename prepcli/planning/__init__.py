"""What a conversion will do, as pure data: the index algebra, grids, plans, and the proof that they add up."""
