"""Draws the simulation toward the large: when the first token comes, how fast the others follow.

The same file gives the same pictures; each names what it was made from.
"""

import json
from pathlib import Path
from typing import Any

from bench.lib.results import ROOT

# picture -> the field that it shows, the factor of its unit, and the title of its axis
PICTURES = {
    ROOT / "docs" / "simulation-first.svg": (
        ("time_to_first_token", 1.0, "time to first token, 95 % (s)")
    ),
    ROOT / "docs" / "simulation-between.svg": (
        ("time_between_tokens", 1e3, "time between tokens, 95 % (ms)")
    ),
}


def draw(source: Path, target: Path, what: tuple[str, float, str], origin: str) -> None:
    """Draw one quantity over the number of machines, a line for each policy."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    result: dict[str, Any] = json.loads(source.read_text())
    field, factor, title = what
    style = {"svg.hashsalt": "tcb", "svg.fonttype": "none", "font.family": "sans-serif"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.0), layout="constrained")
        for (policy, rows), marker in zip(result["policies"].items(), "os^v", strict=True):
            counts = [row["machines"] for row in rows]
            values = [factor * row[field]["p95"] for row in rows]
            axes.plot(counts, values, marker=marker, label=policy, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, map(str, counts))
        axes.set_xlabel(f"machines (number), each {result['machine']['name']}")
        axes.set_ylabel(title)
        axes.set_title(
            f"{result['model']}, {result['users']:,} users who think {result['think_seconds']:.0f}"
            " s: simulated, not measured",
            fontsize=10,
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(target, format="svg", metadata={"Date": None, "Source": origin})
        pyplot.close(figure)
    lines = [line.rstrip() for line in target.read_text().splitlines()]
    target.write_text("\n".join(lines) + "\n")
