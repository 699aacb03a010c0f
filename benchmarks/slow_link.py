"""The cost of a slow link between learner and rollout worker for a run on the delta channel: throughput against loopback.

    python benchmarks/slow_link.py [--round-trip-ms 20] [--mbit 200] [--steps 8] [--rounds 1] [--json] [section.key=value …]

The workload is that of benchmarks/end_to_end.py with weights in bfloat16 for generation. Coordinator, learner, reward worker and an S3
server (moto) are in one network namespace, the rollout worker in turns in the same one (loopback) and in another at the
end of a link of that round trip and rate in each direction: leases, groups and weights all go over it. Everything else
is the same, SHA-256 digests included. Needs root, `ip`, /dev/net/tun, s3fs and moto; names what is missing and ends with
status 0 otherwise. Results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["PACELINE_INSECURE"] = "1"  # the sites are network namespaces of this machine

from end_to_end.workload import Workload, write_workload
from short_form import parse
from slow_link import site, store
from slow_link.arm import measure

WARM_UP_STEPS = 3


def main() -> None:
    """Parses, measures both places, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-trip-ms", type=float, default=20.0)
    parser.add_argument("--mbit", type=float, default=200.0, help="of each direction")
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured, of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs at each place, in turns")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parse(parser, steps=1)
    if lacking := site.missing() or store.missing():
        print(f"skipped: {lacking}", file=sys.stderr)
        return
    with (
        tempfile.TemporaryDirectory(prefix="paceline-slow-link-") as name,
        site.Sites(options.round_trip_ms, options.mbit) as sites,
        store.s3_server() as url,
    ):
        result = _measure(Path(name), sites, url, options)
    if options.json:
        json.dump(result, sys.stdout)
        print()


def _measure(directory: Path, sites: site.Sites, url: str, options: argparse.Namespace) -> dict[str, Any]:
    workload = Workload(32, 1, 4, 4, max_new_tokens=16, mean_length=8.0) if options.short else Workload()
    write_workload(directory, workload)
    link = sites.measure()
    print(f"the link: {link['round_trip_ms']} ms, {link['mbit_per_s']} Mbit/s by TCP", file=sys.stderr)
    arms = []
    load_average = os.getloadavg()[0]
    for number in range(options.rounds):
        for place in ("near", "far"):
            folder = directory / f"{place}-{number}"
            arm = measure(folder, workload, sites, url, place, WARM_UP_STEPS, options.steps, options.overrides)
            arms.append(arm)
            print(
                f"{place:>4}: {arm['tokens_per_s']:.0f} tokens/s, {arm['samples_per_s']:.2f} samples/s, {arm['step_s']:.2f} s "
                f"a step; a version is {arm['version_bytes'] / 1e3:.0f} kB and takes {arm['publish_s']:.3f} s; "
                f"{arm['link_bytes'] / 1e6:.1f} MB came over the link",
                file=sys.stderr,
            )
    rates = {place: mean(a["tokens_per_s"] for a in arms if a["place"] == place) for place in ("near", "far")}
    print(f"{rates['far'] / rates['near']:.1%} of loopback's tokens a second", file=sys.stderr)
    return {
        "link": link,
        "load_average_before": load_average,
        "arms": arms,
        "fraction_of_loopback": rates["far"] / rates["near"],
    }


if __name__ == "__main__":
    main()
