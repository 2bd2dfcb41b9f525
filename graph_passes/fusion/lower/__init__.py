"""What the ops of a graph mean for fusion, and sets of them as programs and regions. Pure: it decides nothing."""
