"""`python -m tests.kit.planted NAME --seed N [--effects daemon]`: one simulated run with a fault planted."""

import argparse

from diloco_node.lab.sim.seed_report import FAST, format_report
from diloco_node.lab.sim.simulation import HOSTS, simulate
from tests.kit.planted import CHEAT_FAULTS, CORE_FAULTS, EFFECT_FAULTS

parser = argparse.ArgumentParser(prog="python -m tests.kit.planted")
parser.add_argument("name", choices=sorted(CORE_FAULTS | CHEAT_FAULTS | EFFECT_FAULTS))
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--effects", choices=sorted(HOSTS), default=FAST)
options = parser.parse_args()
faults = CORE_FAULTS | (CHEAT_FAULTS if options.effects == FAST else EFFECT_FAULTS)
if options.name not in faults:
    parser.error(f"{options.name} is planted with --effects {'daemon' if options.effects == FAST else FAST}")
print(format_report(simulate(options.seed, fault=faults[options.name], effects=options.effects)))
