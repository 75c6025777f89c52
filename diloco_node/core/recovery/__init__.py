"""What this region lacks and how it comes to it: versions, fetches, digests that differ."""
