"""The arithmetic of merges: fragments, stripes, weights, outliers, the outer step, carry-over, and when to merge."""
