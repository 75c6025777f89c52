"""A region's decisions: facts in, commands out. No clock, socket, file, thread, environment or logging in here.

`region` puts them together; the simulator runs the same package. `ledger` orders what is decided, `rounds` decides it,
`merge` does the arithmetic, `recovery` follows the ledger with bytes, `membership` knows who is there.
"""
