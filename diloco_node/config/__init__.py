"""Settings: run.toml, shared by all regions, then `DILOCO_...` variables, then flags, become one frozen `NodeConfig`.

`units` parses values with a unit, `schema` says what there is and which values are allowed, `sources` reads file,
environment and flags and remembers where each value came from, `resolve` puts them together and explains what is wrong.

This file imports none of them: the daemon wants `budget_plan` alone, and the others bring pydantic.
"""
