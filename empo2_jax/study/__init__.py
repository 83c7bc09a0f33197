"""Studies: grids of arms × seeds, their statistics, their results file and their page."""
