"""Settings: run.toml, shared by all regions, then `DILOCO_...` variables, then flags, become one frozen `NodeConfig`.

`units` parses values with a unit, `schema` says what there is and which values are allowed, `sources` reads file,
environment and flags and remembers where each value came from, `resolve` puts them together and explains what is wrong.
"""

from diloco_node.config.resolve import NodeConfig, load_config
from diloco_node.config.sources import Flag
from diloco_node.config.units import Duration

__all__ = ["Duration", "Flag", "NodeConfig", "load_config"]
