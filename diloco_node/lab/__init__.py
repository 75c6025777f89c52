"""The laboratory, which no region runs: simulator, emulated WAN, faults on purpose, and a demo on one machine."""
