"""One region's state folder: what it has said is written survives a power cut."""
