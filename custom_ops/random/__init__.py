"""GPU programs of TfmemStepDraws: random numbers of all steps of a loop."""
