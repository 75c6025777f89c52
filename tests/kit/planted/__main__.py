"""`python -m tests.kit.planted [NAME...] --seeds A..B`: how many seeds of the standard mix find each planted fault.

One line of JSON a fault: seeds run, seeds that find it, the first of them and its words. With `--first` a fault ends at
the first seed that finds it; with `--seconds` at the first seed after so many.
"""

import argparse
import json
import logging
import time
from contextlib import closing

import structlog

from diloco_node.lab.sim.hunt import reports, seed_range
from diloco_node.lab.sim.seed_report import FAST
from diloco_node.lab.sim.simulation import HOSTS
from tests.kit.planted import CHEAT_FAULTS, CORE_FAULTS, EFFECT_FAULTS

parser = argparse.ArgumentParser(prog="python -m tests.kit.planted")
parser.add_argument("names", nargs="*", metavar="NAME")
parser.add_argument("--seeds", type=seed_range, default=(0, 99), help="A..B, both counted")
parser.add_argument("--first", action="store_true", help="end a fault at the first seed that finds it")
parser.add_argument("--seconds", type=float, default=float("inf"), help="a fault gets so many")
parser.add_argument("--jobs", type=int, default=1)
parser.add_argument("--effects", choices=sorted(HOSTS), default=FAST)


def main() -> None:
    """Print the table."""
    options = parser.parse_args()
    faults = CORE_FAULTS | (CHEAT_FAULTS if options.effects == FAST else EFFECT_FAULTS)
    if unknown := set(options.names) - set(faults):
        parser.error(
            f"{sorted(unknown)} can't be planted with --effects {options.effects}: {', '.join(sorted(faults))}"
        )
    first, last = options.seeds
    for name in options.names or sorted(faults):
        began_s, count, finds = time.monotonic(), 0, {}
        hunt = reports(range(first, last + 1), jobs=options.jobs, fault=faults[name], effects=options.effects)
        with closing(hunt):
            for report in hunt:
                count += 1
                if not report.is_good:
                    finds[report.seed] = report.violations[0]
                if time.monotonic() - began_s > options.seconds or (options.first and finds):
                    break
        row = {"fault": name, "seeds": count, "found": len(finds), "seconds": round(time.monotonic() - began_s, 1)}
        where = {"first": min(finds), "words": finds[min(finds)]} if finds else {}
        print(json.dumps(row | where), flush=True)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    main()
