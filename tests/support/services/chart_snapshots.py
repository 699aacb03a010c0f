"""The chart's objects by values file, as compact YAML: `python tests/support/services/chart_snapshots.py` writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "paceline"
SNAPSHOTS = ROOT / "tests" / "deploy" / "snapshots"
HELM = {major: Path(sys.prefix) / "helm" / major / "helm" for major in ("3", "4")}
EXAMPLES = sorted(path.stem.removeprefix("values-") for path in CHART.glob("values-*.yaml"))


VERSION: str = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
EQUAL_LABELS = {"helm.sh/chart"} | {
    f"app.kubernetes.io/{name}" for name in ("name", "instance", "managed-by", "version")
}
"""Labels of every object."""


class _Dumper(yaml.CSafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def snapshot(manifests: tuple[dict[str, Any], ...]) -> str:
    """Return one block for each object, by kind and name, without labels that all have. Data of ConfigMaps and Secrets are
    left out: they are files of the chart, or random."""
    objects = {f"{each['kind']}/{each['metadata']['name']}": each for each in manifests}
    blocks = []
    for name, manifest in sorted(objects.items()):
        content = {key: value for key, value in _reduced(manifest).items() if key not in ("data", "stringData")}
        flow = yaml.dump(content, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=116)
        blocks.append(f"# {name}\n---\n{flow}")
    return "".join(blocks).replace(VERSION, "VERSION")


def _reduced(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _reduced(value) for key, value in tree.items() if key not in EQUAL_LABELS}
    return [_reduced(each) for each in tree] if isinstance(tree, list) else tree


def path_of(example: str) -> Path:
    return SNAPSHOTS / f"{example}.yaml"


def main() -> None:
    for example in EXAMPLES:
        command = [
            str(HELM["4"]),
            "template",
            "paceline",
            str(CHART),
            "--values",
            str(CHART / f"values-{example}.yaml"),
        ]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        path_of(example).write_text(snapshot(tuple(filter(None, yaml.load_all(text, yaml.CSafeLoader)))))


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    main()
