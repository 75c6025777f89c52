"""The fake world: virtual time, links, disks and learners around the real cores, with checkers and planted faults."""
