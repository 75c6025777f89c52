"""How the parameters of a model lie in memory, as the pieces of fragments."""
