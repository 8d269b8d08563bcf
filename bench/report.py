"""Turn the JSON files of `bench/results` into the tables and the figure of the README and docs.

    python -m bench.report [--write] [--figure]

It measures nothing and rounds only for display; a number that is in no file appears nowhere.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.lib import sim_plots
from bench.lib.results import RESULTS, ROOT

FIGURE = ROOT / "docs" / "serving.svg"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
# the rows of the README
HEADLINES = (
    "serve-cpu-smollm2-chat128",
    "serve-cpu-smollm2-chat32",
    "serve-cpu-smollm2-long16",
)
TITLES = {
    "tcb": "tcb",
    "transformers-cb": "transformers' continuous batching",
    "generate-padded": "model.generate, padded",
}
BEGIN, END = "<!-- results: written by bench/report.py -->", "<!-- end of results -->"

Result = dict[str, Any]


def main() -> None:
    """Print the tables, or write them into README.md and docs/results.md; draw the figure."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="write them into the two pages")
    parser.add_argument("--figure", action="store_true", help="draw docs/serving.svg")
    given = parser.parse_args()
    if given.figure:
        name = next(name for name, result in read().items() if result.get("kind") == "sweep")
        draw(RESULTS / f"{name}.json", FIGURE)
        source = RESULTS / "simulation-large.json"
        for target, what in sim_plots.PICTURES.items() if source.exists() else ():
            sim_plots.draw(source, target, what, origin(source))
    if given.write:
        for path, content in pages(read()).items():
            path.write_text(with_tables(path.read_text(), content))
    if not (given.write or given.figure):
        print(tables(read()))


def draw(source: Path, target: Path) -> None:
    """Draw tokens a second over the number of requests. The same file gives the same picture.

    The picture names what it was made from in its metadata, as `origin` does.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    result = json.loads(source.read_text())
    facts, points = result["environment"], result["points"]
    # text as text; identifiers from a fixed salt
    style = {"svg.hashsalt": "tcb", "svg.fonttype": "none", "font.family": "sans-serif"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.0), layout="constrained")
        counts = [point["requests"] for point in points]
        for (name, title), marker in zip(TITLES.items(), "os^", strict=True):
            speeds = [point["systems"][name]["tokens_per_second"] for point in points]
            axes.plot(
                counts, speeds, marker=marker, label=title, linewidth=2 if marker == "o" else 1
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, map(str, counts))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests (number)")
        axes.set_ylabel("generated tokens per second (1/s)")
        axes.set_title(_sweep_title(result), fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()
        threads = f", {facts['threads']} threads" if facts["device_type"] == "cpu" else ""
        figure.supxlabel(
            f"{facts['device']}{threads}, {_commit(facts)}", fontsize=8, x=0.99, ha="right"
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="svg", metadata={"Date": None, "Source": origin(source)})
        pyplot.close(figure)
    # the writer ends some lines with blanks
    lines = [line.rstrip() for line in target.read_text().splitlines()]
    target.write_text("\n".join(lines) + "\n")


def origin(source: Path) -> str:
    """Return what a picture says it was made from: the name of a file and a hash of its content."""
    return f"{source.name} sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}"


def _sweep_title(result: Result) -> str:
    workload = result["workload"]
    prompt = result["points"][-1]["prompt_tokens"] / result["points"][-1]["requests"]
    return (
        f"{result['model']}, {result['dtype']}: prompts of about {prompt:.0f} tokens,"
        f" {workload['new_tokens']} new tokens each"
    )


def read(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the content of each JSON file by its name without ending, in alphabetical order."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def pages(results: dict[str, Result]) -> dict[Path, str]:
    """Return what stands between the markers of each page."""
    return {README: headlines(results), PAGE: tables(results)}


def headlines(results: dict[str, Result]) -> str:
    """Return the README's few rows: tokens a second beside the others."""
    header = ("tokens/s", "tcb", "transformers' continuous batching", "padded `generate`", "ratio")
    rows = [
        (_workload(results[name]), *_speeds(results[name]["systems"]))
        for name in HEADLINES
        if name in results
    ]
    return _markdown(header, rows)


def tables(results: dict[str, Result]) -> str:
    """Return all tables as markdown."""
    kinds: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        kinds.setdefault(result.get("kind", ""), {})[name] = result
    parts = [_serving(kinds.get("serve", {}))]
    if "bare" in kinds:
        parts.append(_bare(kinds["bare"]))
    parts.append(_equality(kinds.get("equality", {})))
    if "host" in results:
        parts.append(_host(results["host"]))
    if "compile" in results:
        parts.append(_compile(results["compile"]))
    if "simulation-check" in kinds:
        parts.append(_simulation_check(kinds["simulation-check"]))
    if "simulation" in kinds:
        parts.append(_simulation(kinds["simulation"]))
    return "\n\n".join(parts)


def with_tables(text: str, content: str) -> str:
    """Return a page's text with what is between its two markers replaced by `content`."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def between_markers(text: str) -> str:
    """Return what stands between the two markers of a page's text."""
    return text.split(BEGIN)[1].split(END)[0].strip()


def _serving(results: dict[str, Result]) -> str:
    """One row a file: tokens a second of each system, and the ratio to transformers' own."""
    header = (
        "tokens/s: model, workload",
        "tcb",
        "transformers' continuous batching",
        "padded `generate`",
        "tcb / transformers'",
        "tokens equal `generate` alone (tcb, transformers', padded)",
        "file",
    )
    rows = []
    for name, result in results.items():
        systems = result["systems"]
        if {"tcb", "transformers-cb", "generate-padded"} - set(systems):
            continue
        own, peer, padded = (systems[key] for key in ("tcb", "transformers-cb", "generate-padded"))
        agreement = _agreement(result, (own, peer, padded))
        rows.append((_workload(result), *_speeds(systems), agreement, _file(name, result)))
    if not any(result["environment"]["device_type"] != "cpu" for result in results.values()):
        rows.append(("on a GPU", *["not measured"] * 5, ""))
    return _markdown(header, rows)


def _speeds(systems: dict[str, Result]) -> tuple[str, ...]:
    """Tokens a second of tcb, transformers' own and padded `generate`; tcb over transformers'."""
    names = ("tcb", "transformers-cb", "generate-padded")
    own, peer, padded = (systems[name]["tokens_per_second"] for name in names)
    return f"**{own:.0f}**", f"{peer:.0f}", f"{padded:.0f}", f"**{own / peer:.2f}**"


def _workload(result: Result) -> str:
    workload = result["workload"]
    average = result["prompt_tokens"] / workload["requests"]
    text = f"{result['model']} {result['dtype']}, {workload['requests']} prompts of {average:.0f}"
    if workload["shared"]:
        text += f" ({workload['shared']} common)"
    return f"{text}, {workload['new_tokens']} new"


def _agreement(result: Result, systems: Iterable[Result]) -> str:
    counts = [system["equal_to_generate_alone"] for system in systems]
    if None in counts:
        return "not compared"
    return f"{', '.join(map(str, counts))} of {result['workload']['requests']}"


def _bare(results: dict[str, Result]) -> str:
    """One row a file: what the forward passes alone, without attention, would allow."""
    header = ("tokens/s: model, workload", "tcb", "the bare model", "tcb / bare", "file")
    rows = []
    for name, result in results.items():
        speeds, workload = result["tokens_per_second"], result["workload"]
        rows.append(
            (
                f"{result['model']}, {workload['requests']} prompts of"
                f" {result['prompt_tokens'] // workload['requests']}, {workload['new_tokens']} new",
                f"{speeds['tcb']:,.0f}",
                f"{speeds['bare']:,.0f}",
                f"{speeds['tcb'] / speeds['bare']:.0%}",
                _file(name, result),
            )
        )
    return _markdown(header, rows)


def _equality(results: dict[str, Result]) -> str:
    """One row a file: how many requests had exactly the tokens of `generate`."""
    header = (
        "greedy fp32 tokens against `generate` alone",
        "settings",
        "requests equal",
        "preemptions",
        "file",
    )
    rows = []
    for name, result in results.items():
        settings, lengths = result["rows"], result["prompts"]
        # results of before the field had its present name say "relief"
        preemptions = sum(
            sum(row.get("preemptions", row.get("relief")).values()) for row in settings
        )
        rows.append(
            (
                f"{result['model']}, {len(lengths)} prompts of {min(lengths)} to {max(lengths)} "
                f"tokens, {result['new_tokens']} new",
                str(len(settings)),
                f"{sum(row['equal'] for row in settings)} of {len(settings) * len(lengths)}",
                str(preemptions),
                _file(name, result),
            )
        )
    return _markdown(header, rows or [("real models", *["not measured"] * 3, "")])


def _host(result: Result) -> str:
    """One row for groups, page size and number of sequences; a column for each context."""
    cases = result["cases"]
    contexts = sorted({case["context"] for case in cases})
    header = ("host cost of one decode step, ms",)
    header += tuple(f"context {context:,}" for context in contexts)
    keys = dict.fromkeys((case["groups"], case["page_size"], case["sequences"]) for case in cases)
    rows = []
    for groups, page_size, sequences in keys:
        found = {
            case["context"]: f"{case['median_ms']:.2f}"
            for case in cases
            if (case["groups"], case["page_size"], case["sequences"])
            == (groups, page_size, sequences)
        }
        title = f"{sequences:,} sequences, {groups}, page {page_size}"
        rows.append((title, *(found.get(context, "not measured") for context in contexts)))
    return _markdown(header, rows) + "\n\n" + _file("host", {"environment": result})


def _compile(result: Result) -> str:
    """One row an architecture: what spills, and what plain launches of head size 128 hold."""
    header = (
        "compiled ahead of time for",
        "launches",
        "that spill",
        "prefill, head size 128: registers, shared KiB, programs a processor, matrix instructions",
        "decode: registers, shared KiB, programs, KiB in flight a processor",
    )
    rows = []
    for arch in dict.fromkeys(launch["arch"] for launch in result["launches"]):
        found = [launch for launch in result["launches"] if launch["arch"] == arch]
        plain = {launch["kind"]: launch for launch in found if launch["fields"] == {"dim": 128}}
        wide, decode = plain["wide"], plain["decode"]
        units = {"HGMMA", "HMMA", "UTCHMMA", "MFMA"} & wide.keys()
        unit = ", ".join(f"{wide[unit]} {unit}" for unit in sorted(units) if wide[unit])
        rows.append(
            (
                arch if arch.startswith(("sm_", "gfx")) else f"{arch} devices",
                str(len(found)),
                str(sum(launch["spills"] > 0 for launch in found)),
                f"{_occupancy(wide)}, {unit}",
                f"{_occupancy(decode)}, {decode['bytes_in_flight'] / 1024:.0f}",
            )
        )
    facts = result["environment"]
    by = f"triton {facts['triton']}, {_commit(facts)}"
    return _markdown(header, rows) + f"\n\n[compile](../bench/results/compile.json): {by}"


def _simulation(results: dict[str, Result]) -> str:
    """One row a file, policy and number of machines."""
    header = (
        "simulated: model, machine, users, think time",
        "machines",
        "policy",
        "tokens/s of one",
        "first token, median and 95 %, s",
        "between tokens, median and 95 %, ms",
        "prefix hits",
        "preemptions",
    )
    rows, files = [], []
    for name, result in results.items():
        title = (
            f"{result['model']}, {result['machine']['name']}, {result['users']:,},"
            f" {result['think_seconds']:.0f} s"
        )
        for policy, found in result["policies"].items():
            for row in found:
                first, between = row["time_to_first_token"], row["time_between_tokens"]
                rows.append(
                    (
                        title,
                        str(row["machines"]),
                        policy,
                        f"{row['tokens_per_second']:,.0f}",
                        f"{first['p50']:.2f}, {first['p95']:.2f}",
                        f"{1e3 * between['p50']:.0f}, {1e3 * between['p95']:.0f}",
                        f"{row['prefix_hits']:.0%}",
                        str(row["preemptions"]),
                    )
                )
        files.append(_file(name, result))
    return _markdown(header, rows) + "\n\n" + "\n\n".join(files)


def _simulation_check(results: dict[str, Result]) -> str:
    """One row a workload: what was predicted, and what was measured."""
    header = ("simulated and served here", "predicted, s", "measured, s", "error", "file")
    rows = [
        (
            "{} prompts of {}, {} new".format(*row["workload"]),
            f"{row['predicted']:.2f}",
            f"{row['measured']:.2f}",
            f"{row['error']:+.0%}",
            _file(name, result),
        )
        for name, result in results.items()
        for row in result["rows"].values()
    ]
    return _markdown(header, rows)


def _occupancy(launch: Result) -> str:
    return f"{launch['registers']}, {launch['shared'] / 1024:.0f}, {launch['resident']}"


def _file(name: str, result: Result) -> str:
    facts = result["environment"]
    threads = f", {facts['threads']} threads" if facts["device_type"] == "cpu" else ""
    return f"[{name}](../bench/results/{name}.json): {facts['device']}{threads}, {_commit(facts)}"


def _commit(facts: Result) -> str:
    return (facts["commit"] or "no commit")[:9] + (", changed" if facts["dirty"] else "")


def _markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
