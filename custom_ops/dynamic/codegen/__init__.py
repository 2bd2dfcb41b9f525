"""The GPU kernel of a dynamic net (VPPS): what it holds on chip, how nodes are cut between barriers, its source."""
