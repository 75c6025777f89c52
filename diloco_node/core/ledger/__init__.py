"""The replicated ledger: one order of merges, decided by a majority, with the token account over it."""
