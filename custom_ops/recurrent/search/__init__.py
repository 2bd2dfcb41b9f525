"""Which configurations of a recurrent kernel there are, how fast each should be, and how fast it is."""
