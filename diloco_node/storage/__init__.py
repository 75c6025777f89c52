"""Files of a region's state folder: ledger, payloads, parameters, counters; all of it survives a power cut."""
