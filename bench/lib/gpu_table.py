"""The result of `bench.gpu` as lines of text.

It reads the record that `bench.gpu` writes, and measures nothing.
"""

from bench.lib.records import Record


def table(content: Record) -> str:
    """Device, checks, timings, serving and what failed."""
    parts = [_head(content["environment"])]
    if content["reduced"]:
        parts.append("reduced, in Triton's interpreter: no time here means anything")
    if "checks" in content:
        parts.append(_checks(content["checks"]))
    if "timings" in content:
        parts.append(_timings(content["timings"]))
    if "serving" in content:
        parts.append(_serving(content["serving"]))
    parts.append(_failed(content["failed"]))
    return "\n\n".join(parts)


def _head(facts: Record) -> str:
    names = "device", "driver", "torch", "triton", "transformers", "commit"
    text = ", ".join(f"{name} {facts.get(name)}" for name in names)
    limits = facts.get("ceilings")
    if not limits:
        return text
    terabytes = [limits[f"{name}_bytes_per_second"] / 1e12 for name in ("copy", "read")]
    rate = limits["bf16_flop_per_second"] / 1e12
    return (
        f"{text}\nmeasured ceilings: copy {terabytes[0]:.3f} TB/s, read {terabytes[1]:.3f} TB/s, "
        f"bf16 product {rate:.2f} TFLOP/s"
    )


def _checks(units: dict[str, Record]) -> str:
    states: dict[str, int] = {}
    for unit in units.values():
        state = "skipped" if "skipped" in unit.get("record", {}) else unit["state"]
        states[state] = states.get(state, 0) + 1
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    lines = [f"checks: {counts}"]
    for name, unit in units.items():
        if "skipped" in unit.get("record", {}):
            lines.append(f"  skipped: {name}: {unit['record']['skipped']}")
    return "\n".join(lines)


def _timings(units: dict[str, Record]) -> str:
    lines = [f"{'workload':32}{'contender':22}{'us':>10}{'TB/s':>8}{'TFLOP/s':>9}{'x floor':>9}"]
    for name, unit in units.items():
        record = unit.get("record", {})
        if "contenders" not in record:
            lines.append(f"{name:32} {record.get('skipped', unit['state'])}")
            continue
        best = record["best_comparator"]
        ratio = f", {best} takes {record['ratio_to_best']} times ours" if best else ""
        lines.append(f"{name:32} floor {record['floor_us']:.1f} us{ratio}")
        lines += [_contender(record, who, result) for who, result in record["contenders"].items()]
    return "\n".join(lines)


def _contender(record: Record, name: str, result: Record) -> str:
    if "us" not in result:
        return f"{'':32}{name:22} {result.get('cannot', 'not timed')[:90]}"
    us = result["us"]
    speeds = f"{record['bytes'] / us / 1e6:8.3f}{record['flop'] / us / 1e6:9.2f}"
    note = "" if not result["no_graph"] else "  no graph"
    return f"{'':32}{name:22}{us:10.1f}{speeds}{us / record['floor_us']:9.2f}{note}"


def _serving(units: dict[str, Record]) -> str:
    lines = [f"{'model':22}{'contender':30}{'tokens/s':>10}"]
    for name, unit in units.items():
        record = unit.get("record", {})
        ratio = f"tcb / transformers {record['ratio']}" if "ratio" in record else unit["state"]
        lines.append(f"{name:22}{ratio}; CUDA graphs of tcb: {record.get('tcb_graphs')}")
        for who, choice in record.get("contenders", {}).items():
            speed = choice.get("tokens_per_second", "none")
            why = "" if speed != "none" else f"  {choice.get('error') or choice['trials']}"[:110]
            lines.append(f"{'':22}{who:30}{speed:>10}{why}")
    return "\n".join(lines)


def _failed(failed: dict[str, dict[str, str]]) -> str:
    lines = [
        f"FAILED {part}: {name}: {' '.join(text.split())[:300]}"
        for part, faults in failed.items()
        for name, text in faults.items()
    ]
    return "\n".join(lines) or "nothing failed"
