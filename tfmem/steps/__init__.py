"""The life of an optimised training step: trace, dry run, observed calls, trials, contest, settled."""
