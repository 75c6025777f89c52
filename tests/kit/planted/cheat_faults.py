"""What one region does wrong in right words, as faults: nobody is excused for it, so the checkers must find each."""

from functools import partial

from diloco_node.lab.sim.cheats import CHEATS, Cheat
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.planting import Fault


def _begin(cheat: Cheat, host: Host) -> None:
    if host.name == host.setup.regions[0]:
        cheat.begin(host)


CHEAT_FAULTS: dict[str, Fault] = {
    name: Fault(name, "a region does what it says", plant=partial(_begin, cheat)) for name, cheat in CHEATS.items()
}
