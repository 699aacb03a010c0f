"""The speed at which new weights reach rollout workers, against the best that the machine could do.

    python benchmarks/weights.py [--hosts 8] [--delta-sizes 50M] [--rounds 7] [--json]

By host (`--hosts 8`): one version along a chain of hosts, which are network namespaces with shaped links, against the time
to one host (needs root, `ip` and `tc`); hundreds of simulated hosts against the formula and the coordinator's part
(`--simulated 200`); and the time for which staging blocks two learner ranks against one copy of their shards
(`--publish-bytes 2147483648`). What cannot be measured here is skipped and said so.

Delta channel: nanoseconds of an element in its codec, on one core, bytes and seconds of a version over Adam steps, and whether
each of them is read back bit for bit
(benchmarks/weight_cases/delta.py says what the weights and the gradients are). `--delta-sizes ""` leaves it out.
Results: docs/operate/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from short_form import parse
from weight_cases import chain, codec, delta, many_hosts, publish_block, shaped_hosts
from weight_cases.models import SHAPES


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--delta-sizes",
        default="50M",
        help=f"sizes for the delta channel, of {', '.join(SHAPES)}; empty for none",
    )
    parser.add_argument("--lrs", default="1e-6,2e-6,3e-6", help="learning rates for the delta channel")
    parser.add_argument("--versions", type=int, default=50, help="deltas at each learning rate")
    parser.add_argument("--hosts", type=int, default=8, help="hosts of the shaped chain; 0 for none")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of each of their links, in Mbit/s")
    parser.add_argument("--chain-bytes", type=int, default=100_000_000)
    parser.add_argument("--simulated", type=int, default=200, help="simulated hosts; 0 for none")
    parser.add_argument("--publish-bytes", type=int, default=2 << 30, help="model of two ranks; 0 for none")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parse(
        parser,
        rounds=1,
        delta_sizes="1M",
        lrs="1e-6",
        versions=2,
        hosts=2,
        chain_bytes=4_000_000,
        simulated=4,
        publish_bytes=64 << 20,
    )
    result: dict[str, Any] = {"machine": _machine()}
    with tempfile.TemporaryDirectory(prefix="paceline-weights-") as name:
        result |= _by_host(Path(name), options)
        result |= _codec(options)
        result |= _delta(Path(name), options)
    result["load_average_after"] = os.getloadavg()[0]
    if options.json:
        json.dump(result, sys.stdout)
        print()


def _by_host(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.hosts and (lacking := shaped_hosts.missing()):
        print(f"the chain of hosts: skipped, {lacking}", file=sys.stderr)
    elif options.hosts:
        row = chain.measure(directory, options.chain_bytes, options.hosts, options.mbit, min(options.rounds, 2))
        print(
            f"{row['bytes'] / 1e6:.0f} MB over {row['mbit']:.0f} Mbit/s: one host {row['one_s']:.2f} s, a chain of "
            f"{row['hosts']} {row['chain_s']:.2f} s ({row['chain_time_over_one_host']:.2f} ×), from the learner to each "
            f"{row['star_s']:.2f} s; its uplink carried {row['learner_uplink_copies']:.2f} copies",
            file=sys.stderr,
        )
        keys = ("chain_time_over_one_host", "learner_uplink_copies")
        found |= {"chain": row} | {key: row[key] for key in keys}
    if options.publish_bytes and (lacking := publish_block.missing(options.publish_bytes)):
        print(f"staging {options.publish_bytes / 1e9:.1f} GB: skipped, {lacking}", file=sys.stderr)
    elif options.publish_bytes:
        row = publish_block.measure(options.publish_bytes, options.rounds)
        print(
            f"{row['bytes'] / 1e9:.1f} GB on {row['ranks']} ranks: blocked for {row['block_s']:.3f} s, one copy takes "
            f"{row['memcpy_s']:.3f} s ({row['publish_block_over_memcpy']:.2f} ×)",
            file=sys.stderr,
        )
        found |= {"publish": row, "publish_block_over_memcpy": row["publish_block_over_memcpy"]}
    if options.simulated:
        rows = asyncio.run(many_hosts.measure(options.simulated, 1 << (18 if options.short else 22), 256, 5e5))
        print(f"{options.simulated} simulated hosts: {rows}", file=sys.stderr)
        found["simulated"] = rows
    return found


def _delta(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for size in filter(None, options.delta_sizes.split(",")):
        for lr in map(float, options.lrs.split(",")):
            row = delta.measure(directory, size, lr, options.versions)
            rows.append(row)
            print(
                f"{size:>5} {row['bytes'] / 1e6:8.1f} MB at lr {lr:.0e}: {row['versions']} versions bit-identical, payload "
                f"{row['payload_fraction_mean']:.2%} of the model (at most {row['payload_fraction_max']:.2%}), written "
                f"{row['write_s']:.3f} s after staging, read in {row['read_s']:.3f} s",
                file=sys.stderr,
            )
    fractions = [row["payload_fraction_mean"] for row in rows]
    return {
        "delta": rows,
        "delta_payload_fraction_mean": sum(fractions) / len(fractions) if fractions else None,
    }


def _codec(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for size in filter(None, options.delta_sizes.split(",")):
        for lr in map(float, options.lrs.split(",")):
            row = codec.measure(size, lr, options.rounds)
            rows.append(row)
            print(
                f"{size:>5} {row['elements'] / 1e6:8.1f} M elements at lr {lr:.0e}: {row['changed_fraction']:.2%} changed, "
                f"{row['codec_fraction']:.2%} of the bytes, coded at {row['encode_ns_per_element']:.2f} and decoded at "
                f"{row['decode_ns_per_element']:.2f} ns an element, two threads {row['two_threads_speedup']:.2f} ×",
                file=sys.stderr,
            )
    return {"codec": rows} | {
        key: sum(row[key] for row in rows) / len(rows) if rows else None
        for key in ("encode_ns_per_element", "decode_ns_per_element")
    }


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "torch": version("torch"),
    }


if __name__ == "__main__":
    main()
