"""Who is alive and who hears whom."""
