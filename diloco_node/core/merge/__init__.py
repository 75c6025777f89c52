"""The making of one merge out of many contributions: cutting, weighing, pacing and the outer step."""
