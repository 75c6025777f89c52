"""The core's orders, carried out: stripes, versions, the disk, and fetches from peers."""
