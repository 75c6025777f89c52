"""How a model's parameters lie in memory: one module per layout."""
