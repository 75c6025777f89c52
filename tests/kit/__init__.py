"""What several tests share: fakes, worlds of fakes, and what starts real processes."""
