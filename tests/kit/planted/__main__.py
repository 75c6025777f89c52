"""`python -m tests.kit.planted NAME --seed N [--effects daemon]`: one simulated run with a fault planted."""

import argparse

from diloco_node.lab.sim.simulation import FAST, HOSTS, format_report, simulate
from tests.kit.planted import CORE_FAULTS, EFFECT_FAULTS

parser = argparse.ArgumentParser(prog="python -m tests.kit.planted")
parser.add_argument("name", choices=sorted(CORE_FAULTS | EFFECT_FAULTS))
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--effects", choices=sorted(HOSTS), default=FAST)
options = parser.parse_args()
faults = CORE_FAULTS if options.effects == FAST else CORE_FAULTS | EFFECT_FAULTS
if options.name not in faults:
    parser.error(f"{options.name} is in the daemon's own effects: add --effects daemon")
print(format_report(simulate(options.seed, fault=faults[options.name], effects=options.effects)))
