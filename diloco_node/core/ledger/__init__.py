"""The replicated ledger: Raft over a hash chain of entries, and the token account that it adds up to."""
