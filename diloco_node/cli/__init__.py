"""The command line: one module per group of commands; imports nothing heavy at the top."""
