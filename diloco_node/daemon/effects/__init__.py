"""What the core orders, carried out: stripes, versions, the disk, and what is fetched from peers."""
