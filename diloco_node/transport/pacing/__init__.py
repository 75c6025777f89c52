"""The bandwidth budget: who may send how much, and when."""
