"""Ways to break a variant: the contract has to catch them all."""
