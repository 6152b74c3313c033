"""One screen of `top`: gauges, tiers, lookups, entries, clients, neighbours, transitions.

Owns: the conversion of documents to lines for rich. Does not own: queries, the terminal. Importing it needs the extra
`top`; the importer reports if that is missing.

Invariants: no line is wider than the requested width, from 80 columns up. Names given by clients move no cursor and are
not read as markup. Lists fit the available rows, however many clients and entries there are, and state how many they
leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group
from rich.text import Text

from ...ipc.modes import Mode
from .daemon import understood
from .live import client_state
from .status import neighbour_text, source_text
from .tables import age, cut, number, printable, share, short, size, table, wrapped

WIDTH_MIN: Final = 80
LIST_MAX: Final = 10
BLOCKS: Final = "█░┃"
ASCII: Final = "#.|"
"""Characters of bars on a terminal with ASCII only: used, free, threshold."""

_NAME_CHARS: Final = 14
_KEY_CHARS: Final = 28
_CUT: Final = ".."
_MADE_UP: Final = ("drill", "file")
_STYLES: Final = {
    Mode.RELAXED: "green",
    Mode.NORMAL: "green",
    Mode.WORKFLOW_AWARE: "cyan",
    Mode.PRESSURE: "yellow",
    Mode.CRITICAL: "red",
    Mode.EMERGENCY: "bold red",
}
_HEAD: Final = "bold"
_ALARM: Final = "bold red"
_ASIDE: Final = "dim"

Document = Mapping[str, Any]


def frame(
    status: Document,
    clients: Sequence[Document],
    entries: Sequence[Document],
    width: int,
    *,
    now_unix_s: float,
    height: int | None = None,
    before: Document | None = None,
    glyphs: str = BLOCKS,
) -> Group:
    """The screen, `width` columns wide.

    Args:
        entries: the queried entries, of which the most used are shown.
        height: the available rows; None: unlimited, with lists of at most 10.
        before: an earlier status, to compute rates.
    """
    with understood("status"):
        governor: Document = status["governor"]
        fixed = [
            *_title(status, before),
            Text(),
            *_gauges(governor, max(width, WIDTH_MIN), glyphs),
            Text(),
            *_tiers(status["store"], governor, max(width, WIDTH_MIN)),
        ]
        processes = [(gauge["gauge"], each) for gauge in governor["gauges"] for each in gauge.get("processes", ())]
        # Three to five lists, each with a blank line, a head, and a line that counts the rest.
        lists = 4 if processes else 3
        # On a small screen neighbours are left out.
        fits = height is None or height - len(fixed) >= 4 * (lists + 1)
        neighbours = governor.get("neighbours", ()) if fits else ()
        lists += bool(neighbours)
        most = LIST_MAX if height is None else max(1, (height - len(fixed)) // lists - 3)
        lines = [
            *fixed,
            *_transitions(governor["transitions"], most, now_unix_s),
            *_processes(processes, most),
            *_neighbours(neighbours, most),
            *_clients(clients, governor["owners"], most),
            *_entries(entries, status["store"]["entries"], most, now_unix_s),
        ]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="crop")
    return Group(*lines)


def bar(used_share: float, thresholds: Sequence[float], width: int, style: str, glyphs: str = BLOCKS) -> Text:
    """A bar of `width` cells, filled according to a share (full above 1), with a mark at each threshold."""
    used, free, mark = tuple(glyphs)
    filled = max(0, min(width, round(used_share * width)))
    marks = {min(width - 1, int(threshold * width)) for threshold in thresholds}
    text = Text()
    for cell in range(width):
        inside = cell < filled
        text.append(mark if cell in marks else used if inside else free, style if inside else _ASIDE)
    return text


def _title(status: Document, before: Document | None) -> list[Text]:
    store = status["store"]
    head = (
        f"tensord {status['version']}, instance {status['instance']}: pid {status['pid']}, epoch {status['epoch']}, "
        f"up {age(status['uptime_s'])}"
    )
    hits = {"host": store["hits"], "device": status["governor"]["counters"].get("used", 0)}
    looked = sum(hits.values()) + store["misses"]
    by_tier = ", ".join(f"{tier} {short(count)}" for tier, count in hits.items())
    found = f"hits {share(sum(hits.values()), looked)} ({by_tier})"
    said = Text(f"lookups {short(looked)}: {found}, misses {short(store['misses'])}")
    return [Text(printable(head), _HEAD), said, *_rates(status, before)]


def _rates(status: Document, before: Document | None) -> list[Text]:
    """Rates since an earlier status of the same daemon."""
    if before is None or before["epoch"] != status["epoch"] or before["uptime_s"] >= status["uptime_s"]:
        return [Text("now     -")]
    seconds = status["uptime_s"] - before["uptime_s"]
    new, old = status["store"], before["store"]
    hits, misses = new["hits"] - old["hits"], new["misses"] - old["misses"]
    puts = sum(new["puts"].values()) - sum(old["puts"].values())
    gone = sum(new["evictions"].values()) - sum(old["evictions"].values())
    said = ", ".join(
        f"{what} {short(round(count / seconds))}/s"
        for what, count in (("lookups", hits + misses), ("puts", puts), ("evictions", gone))
    )
    return [Text(f"now     {said}; hits {share(hits, hits + misses)}")]


def _gauges(governor: Document, width: int, glyphs: str) -> list[Text]:
    thresholds = [share for name, share in governor["thresholds"].items() if name != "hysteresis"]
    marks = ", ".join(f"{name} {share:.0%}" for name, share in governor["thresholds"].items() if name != "hysteresis")
    cells = width - _NAME_CHARS - 41
    lines = [Text(f"{'GAUGE':<{_NAME_CHARS}} {marks}", _HEAD)]
    for gauge in governor["gauges"]:
        style = _STYLES.get(gauge["mode"], "")
        line = Text(f"{cut(gauge['gauge'], _NAME_CHARS, _CUT):<{_NAME_CHARS}} ")
        line.append_text(bar(gauge["share"], thresholds, cells, style, glyphs))
        line.append(f" {share(gauge['share'], 1):>7} {size(gauge['used_bytes']):>8} ")
        line.append(f"{gauge['mode']:<14}", style)
        line.append(f" {age(gauge['since_s']):>6}")
        lines.append(line)
        if gauge["baseline_bytes"]:
            beside = f"beside a {gauge['baseline']} baseline of {size(gauge['baseline_bytes'])}"
            lines.append(Text(f"{'':<{_NAME_CHARS}} {beside}", _ASIDE))
        if remarks := _remarks(gauge):
            lines.append(Text(f"{'':<{_NAME_CHARS}} {remarks}", _ALARM))
    if not governor["gauges"]:
        lines.append(Text("no gauge: the use of the tiers is unknown", _ASIDE))
    failing = (source for source in governor.get("sources", ()) if source["problem"])
    return [*lines, *(Text(f"{'source':<{_NAME_CHARS}} {source_text(source)}", _ALARM) for source in failing)]


def _remarks(gauge: Document) -> str:
    said = []
    if gauge["source"] in _MADE_UP:
        said.append("DRILL: made-up readings" if gauge["source"] == "drill" else "read from a FILE")
    if gauge["stale"]:
        said.append(f"STALE: cannot be read, its value of {age(gauge['age_s'])} ago is used")
    if gauge["refuses"]:
        said.append("REFUSES new entries")
    return "; ".join(said)


def _tiers(store: Document, governor: Document, width: int) -> list[Text]:
    said = [
        f"{share(store['used_bytes'], store['max_bytes'])} of {size(store['max_bytes'])}",
        f"largest free {size(store['largest_free_bytes'])}",
        f"in memory {size(governor['host']['resident_bytes'])}",
    ]
    rows = [("ring", short(store["entries"]), size(store["used_bytes"]), short(store["tokens"]))]
    remarks = [", ".join(said)]
    for device in governor["devices"]:
        name = cut(device["device"], _NAME_CHARS, _CUT)
        rows.append((name, short(device["entries"]), size(device["bytes"]), short(device["tokens"])))
        remarks.append(_device_remarks(device))
    head, *lines = table(("TIER".ljust(_NAME_CHARS), "ENTRIES", "BYTES", "TOKENS"), rows, (1, 2, 3)).splitlines()
    told = [Text(head, _HEAD)]
    for line, remark in zip(lines, remarks, strict=True):
        style = "red" if remark.startswith("STUCK") else ""
        first, *rest = wrapped(printable(remark), width - len(head) - 2)
        told.append(Text(f"{line:<{len(head)}}  {first}", style))
        told += [Text(f"{'':<{len(head)}}  {more}", style) for more in rest]
    return told


def _device_remarks(device: Document) -> str:
    said = [
        f"{what} {size(device[f'{what}_bytes'])}"
        for what in ("ordered", "reserved", "waiting")
        if device[f"{what}_bytes"]
    ]
    if device["floor_blocks"]:
        said.append(f"floor {short(device['floor_blocks'])} of {short(device['capacity_blocks'])} blocks")
    if device["stuck"]:
        said.insert(0, f"STUCK: {device['stuck']}")
    return ", ".join(said)


def _transitions(transitions: Sequence[Document], most: int, now_unix_s: float) -> list[Text]:
    rows = [
        (
            f"{age(now_unix_s - each['unix_s'])} ago",
            cut(each["gauge"], _NAME_CHARS, _CUT),
            f"{each['before']} -> {each['mode']}",
            share(each["share"], 1),
        )
        for each in list(transitions)[: -most - 1 : -1]
    ]
    return [Text(), *_listed(("TRANSITION", "GAUGE", "MODE", "AT"), rows, left_out=len(transitions) - len(rows))]


def _processes(processes: Sequence[tuple[str, Document]], most: int) -> list[Text]:
    """The processes on all cards, those with the most bytes first. Nothing if no source lists processes."""
    if not processes:
        return []
    ordered = sorted(processes, key=lambda each: -(each[1]["bytes"] or 0))
    rows = [
        (
            cut(gauge, _NAME_CHARS, _CUT),
            str(each["pid"]),
            cut(each["name"] or "unknown", 20, _CUT),
            "unknown" if each["bytes"] is None else size(each["bytes"]),
            "unknown" if not each["seen"] else "no" if each["client"] is None else str(each["client"]),
        )
        for gauge, each in ordered[:most]
    ]
    head = ("CARD", "PID", "PROCESS", "ON CARD", "CLIENT")
    return [Text(), *_listed(head, rows, right=(1, 3, 4), left_out=len(ordered) - len(rows))]


def _neighbours(neighbours: Sequence[Document], most: int) -> list[Text]:
    """The neighbours in the order in which they are asked. Nothing if none is configured."""
    if not neighbours:
        return []
    rows = [
        (
            cut(each["neighbour"], _KEY_CHARS, _CUT),
            cut(each["card"] or "any", _NAME_CHARS, _CUT),
            neighbour_text(each),
        )
        for each in neighbours[:most]
    ]
    head = ("NEIGHBOUR", "CARD", "WHEN ASKED LAST")
    return [Text(), *_listed(head, rows, left_out=len(neighbours) - len(rows))]


def _clients(clients: Sequence[Document], owners: Sequence[Document], most: int) -> list[Text]:
    held: dict[object, list[Document]] = {}
    for owner in owners:
        held.setdefault(owner["client"], []).append(owner)

    def rank(row: Document) -> tuple[bool, int, int]:
        owned = held.get(row["client"], [])
        return any(o["unresponsive"] for o in owned), sum(o["bytes"] for o in owned), row["pins"] + row["hits"]

    ordered = sorted(clients, key=rank, reverse=True)
    rows: list[tuple[str, ...]] = []
    alarms: dict[int, str] = {}
    for row in ordered[:most]:
        owned = held.get(row["client"], [])
        state = client_state(row)
        if any(owner["unresponsive"] for owner in owned):
            state = "NOT ANSWERING"
            alarms[len(rows) + 1] = _ALARM
        rows.append(
            (
                "-" if row["client"] is None else str(row["client"]),
                cut(row["name"] or "-", 20, _CUT),
                "-" if row["pid"] is None else str(row["pid"]),
                short(row["pins"]),
                short(row["hits"]),
                short(row["misses"]),
                size(sum(owner["bytes"] for owner in owned)) if owned else "-",
                state,
            )
        )
    head = ("CLIENT", "NAME", "PID", "LEASES", "HITS", "MISSES", "IN VRAM", "STATE")
    left_out = len(ordered) - len(rows)
    return [Text(), *_listed(head, rows, right=(0, 2, 3, 4, 5, 6), styles=alarms, left_out=left_out)]


def _entries(entries: Sequence[Document], stored: int, most: int, now_unix_s: float) -> list[Text]:
    top = sorted(entries, key=lambda entry: entry["uses"], reverse=True)[:most]
    rows = [
        (
            short(entry["uses"]),
            entry["key"][:_KEY_CHARS],
            size(entry["payload_bytes"]),
            short(entry["tokens"]),
            age(now_unix_s - entry["used_unix_s"]),
        )
        for entry in top
    ]
    lines = [Text(), *_listed(("USES", "MOST USED ENTRY", "SIZE", "TOKENS", "IDLE"), rows, right=(0, 2, 3, 4))]
    if stored > len(entries):
        lines.append(Text(f"{number(len(entries))} of {number(stored)} entries were examined", _ASIDE))
    return lines


def _listed(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    styles: Mapping[int, str] | None = None,
    left_out: int = 0,
) -> list[Text]:
    """The lines of a table, its head first. `styles` by line."""
    marked = {0: _HEAD, **(styles or {})}
    lines = [Text(line, marked.get(at, "")) for at, line in enumerate(table(head, rows, right).splitlines())]
    if left_out > 0:
        lines.append(Text(f"and {number(left_out)} more", _ASIDE))
    return lines
