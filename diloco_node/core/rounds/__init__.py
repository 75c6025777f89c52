"""Rounds: what the leader decides, what every region does for them, and what the ledger says about the past ones."""
