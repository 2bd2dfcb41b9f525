"""Steps while they run: observed, planned, tried, measured; and what a graph without later calls gets."""
