"""Traces are read whatever state they are in, and reports say what is in them."""

from __future__ import annotations

import gzip
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moestream.runtime.cli import app
from moestream.runtime.report import ReportUnwritable, make_report, write_report
from moestream.runtime.report_html import page
from moestream.runtime.report_perfetto import COMPUTE, FIRST_LANE, guesses_used, perfetto_events
from moestream.runtime.report_plots import ticks
from moestream.runtime.report_series import covered, deepest, histogram, quantile, rates
from moestream.runtime.trace_records import Depth, Read, Span, Trace
from moestream.runtime.tracefile import TraceUnreadable, read_trace

Json = dict[str, Any]
MAIN, LANES = 4000, (5001, 5002, 5003)
RECORD = 1_000_000
BANDWIDTH = 1e9


class Recording:
    """Makes a trace as an engine would have written it, from made-up times.

    Attributes:
        events: the trace's.
        routed: expert uses of decode, by group.
        waited: likewise those that had to be waited for.
    """

    def __init__(self, layers: int = 4, experts: int = 16, top_k: int = 2, slots: int = 6) -> None:
        self.layers, self.experts, self.top_k, self.slots = layers, experts, top_k, slots
        self.events: list[Json] = []
        self.now = 1000.0
        self.forward = 0
        self.routed, self.waited = [0] * layers, [0] * layers
        self._random = random.Random(7)
        self._names()

    def _names(self) -> None:
        for tid, name in ((MAIN, "compute"), *((t, f"lane {n}") for n, t in enumerate(LANES))):
            self.add("M", "thread_name", tid, name=name)

    def add(self, ph: str, event: str, tid: int, dur: float | None = None, **args: Any) -> None:
        record: Json = {"ph": ph, "name": event, "pid": 1, "tid": tid, "args": args}
        if ph != "M":
            record["ts"] = round(self.now, 3)
        if dur is not None:
            record["dur"] = dur
        self.events.append(record)

    def at(self, ts: float, *event: Any, **args: Any) -> None:
        now, self.now = self.now, ts
        self.add(*event, **args)
        self.now = now

    def prompt(self, tokens: int = 5) -> None:
        begun = self.now
        for group in range(self.layers):
            chosen = list(range(self.slots))
            self._route(group, chosen, tokens)
            self._read(group, 0, speculative=False, took=900.0)
            self.add("X", "stall", MAIN, 800.0, layer=group, group=group, experts=1, unpredicted=1)
            self.now += 1000.0
        self._end("prompt", begun, request=1, tokens=tokens)

    def token(self) -> None:
        begun = self.now
        chance = self._random
        for group in range(self.layers):
            chosen = chance.sample(range(self.experts), self.top_k)
            self._predict(group, chosen)
            self.add("X", "sync", MAIN, 400.0, group=group, layer=group)
            self.now += 400.0
            self._route(group, chosen, 1)
            self.routed[group] += len(chosen)
            if group % 2 and chance.random() < 0.7:
                self._use(group, chosen[0])
            if chance.random() < 0.5:
                self._stall(group, chosen[-1])
            self.now += 100.0
        self._end("token", begun, request=1, token=11)

    def _predict(self, group: int, chosen: list[int]) -> None:
        """Rank 0 is always right, rank 1 never."""
        wrong = next(e for e in range(self.experts) if e not in chosen)
        for distance in (1, 2):
            about: Json = {"layer": group, "group": group, "forward": self.forward}
            about |= {"distance": distance, "experts": [chosen[0], wrong]}
            self.add("i", "predict", MAIN, **about, probabilities=[0.9, 0.2])
        guess = {"group": group, "expert": wrong, "probability": 0.2, "position": self.forward}
        self.add("i", "queue", MAIN, op="guess", **guess)
        self.add("C", "queue_depth", MAIN, demand=1, guesses=2)
        self.add("C", "inflight", MAIN, demand=1, guesses=1)

    def _route(self, group: int, chosen: list[int], tokens: int) -> None:
        position = self.forward * self.layers + group
        about = {"group": group, "layer": group, "forward": self.forward, "position": position}
        self.add("i", "route", MAIN, **about, experts=chosen, tokens=tokens)

    def _read(self, group: int, expert: int, *, speculative: bool, took: float) -> None:
        about = {"layer": group, "group": group, "expert": expert, "bytes": RECORD}
        lane = LANES[(group + speculative) % len(LANES)]
        asked = self.now - 50.0
        self.add("X", "read", lane, took, **about, speculative=speculative, asked=asked)

    def _use(self, group: int, expert: int) -> None:
        self.at(self.now - 390.0, "C", "queue_depth", MAIN, demand=0, guesses=1)
        now, self.now = self.now, self.now - 380.0
        self._read(group, expert, speculative=True, took=300.0)
        self.now = now
        self.add("i", "use", MAIN, group=group, expert=expert, lead_us=430.0)

    def _stall(self, group: int, expert: int) -> None:
        cause = self._random.choice(["late", "evicted", "unpredicted"])
        self._read(group, expert, speculative=False, took=900.0)
        self.add("X", "stall", MAIN, 950.0, layer=group, group=group, experts=1, **{cause: 1})
        self.waited[group] += 1
        self.now += 950.0

    def _end(self, name: str, begun: float, **args: int) -> None:
        self.at(begun, "X", name, MAIN, self.now - begun, **args)
        self.forward += 1
        self.now += 10.0

    def wasted(self, group: int = 0) -> None:
        """A guess that is evicted unused."""
        self._read(group, 15, speculative=True, took=100.0)
        self.now += 200.0
        self.add("i", "evict", MAIN, group=group, expert=15, slot=0, unused=True)

    def document(self) -> Json:
        return {"displayTimeUnit": "ms", "traceEvents": self.events, "moestream": self.header()}

    def header(self) -> Json:
        layer = {"experts": self.experts, "top_k": self.top_k, "slots": self.slots}
        return {
            "version": "1.2",
            "model": "tiny <moe>",
            "layers": [
                {"group": group, "layer": group, "record_bytes": RECORD} | layer
                for group in range(self.layers)
            ],
            "bandwidth_bytes_per_s": BANDWIDTH,
            "config": {"prefetch": "auto", "lanes": 3},
        }


def recording(tokens: int = 12, **shape: int) -> Recording:
    made = Recording(**shape)
    made.prompt()
    for _ in range(tokens):
        made.token()
    made.wasted()
    return made


def save(path: Path, document: Json) -> Path:
    # One event a line, as the engine writes it.
    events = ",\n".join(json.dumps(event) for event in document["traceEvents"])
    others = {k: v for k, v in document.items() if k not in ("traceEvents", "displayTimeUnit")}
    tail = "".join(f",{json.dumps(key)}:{json.dumps(value)}" for key, value in others.items())
    path.write_text(f'{{"displayTimeUnit":"ms","traceEvents":[\n{events}\n]{tail}}}\n')
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save(tmp_path / "run.trace", recording().document())


@pytest.fixture
def trace(file: Path) -> Trace:
    return read_trace(file)


# -- reading --------------------------------------------------------------------------------------


def test_every_kind_of_event_is_read(trace: Trace) -> None:
    assert len(trace.tokens) == 12
    assert len(trace.prompts) == 1
    assert len(trace.routes) == 13 * 4
    assert len(trace.predictions) == 12 * 4 * 2
    assert trace.syncs and trace.stalls and trace.reads and trace.operations
    assert trace.evictions and trace.uses and trace.queue_depth and trace.inflight
    assert trace.threads[MAIN] == "compute"
    assert (trace.model, trace.version, trace.bandwidth) == ("tiny <moe>", "1.2", BANDWIDTH)
    assert trace.layers[3].slots == 6
    assert trace.notices == []


def test_records_are_in_order_of_time(trace: Trace) -> None:
    tokens = [token.ts for token in trace.tokens]
    assert tokens == sorted(tokens)
    assert [read.ts for read in trace.reads] == sorted(read.ts for read in trace.reads)


def test_a_file_cut_in_an_event_is_read_up_to_there(file: Path) -> None:
    text = file.read_text()
    at = text.index('"evict"')
    file.write_text(text[: at + 3])
    trace = read_trace(file)
    assert len(trace.tokens) == 12
    assert trace.evictions == []
    (notice, derived) = trace.notices
    assert "cut off" in notice and "highest id" in derived
    assert trace.layers[0].top_k == 2


@pytest.mark.parametrize("ending", ["", ",", "\n", "{", '{"ph"', "[1, 2"])
def test_any_cut_leaves_the_events_before_it(tmp_path: Path, ending: str) -> None:
    event = '{"ph":"X","name":"token","ts":1,"dur":2,"tid":3,"args":{"request":1,"token":4}}'
    path = tmp_path / "cut"
    path.write_text('{"displayTimeUnit":"ms","traceEvents":[\n' + event + ",\n" + ending)
    assert len(read_trace(path).tokens) == 1


def test_a_header_before_the_cut_is_used(tmp_path: Path) -> None:
    made = recording()
    path = tmp_path / "cut"
    header = json.dumps(made.header())
    path.write_text(f'{{"moestream": {header}, "traceEvents":[{json.dumps(made.events[-1])}')
    assert read_trace(path).model == "tiny <moe>"


def test_a_bare_array_and_gzip_are_read(tmp_path: Path) -> None:
    path = tmp_path / "array.gz"
    path.write_bytes(gzip.compress(json.dumps(recording().events).encode()))
    assert len(read_trace(path).tokens) == 12


def test_a_cut_gzip_file_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    whole = gzip.compress(json.dumps(recording().document()).encode())
    path.write_bytes(whole[: len(whole) * 3 // 4])
    trace = read_trace(path)
    assert trace.routes
    assert len(trace.notices) == 3


def test_unknown_events_are_ignored_and_malformed_ones_counted(tmp_path: Path) -> None:
    made = recording()
    made.add("i", "something new", MAIN, group=1)
    odd: list[Any] = [
        {"ph": "X", "name": "read", "ts": 1},
        7,
        {"ph": "i", "name": "route", "ts": 2},
    ]
    made.events += odd
    trace = read_trace(save(tmp_path / "odd", made.document()))
    assert trace.notices == ["3 events lack what they should have and were left out"]


def test_a_damaged_description_is_said(tmp_path: Path) -> None:
    document = recording().document()
    del document["moestream"]["layers"][1]["slots"]
    trace = read_trace(save(tmp_path / "odd", document))
    assert "description" in trace.notices[0]
    assert len(trace.layers) == 4  # those not described come from the routing


@pytest.mark.parametrize(
    "content", [b"", b"  \n", b"hello", b'{"a": 1}', b"{", b"\x1f\x8bxx", b"\xff"]
)
def test_what_is_no_trace_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.trace"
    path.write_bytes(content)
    with pytest.raises(TraceUnreadable, match=re.escape(str(path))):
        read_trace(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceUnreadable, match="No such file"):
        read_trace(tmp_path / "absent")


# -- figures --------------------------------------------------------------------------------------


def test_hits_are_what_was_not_waited_for(tmp_path: Path) -> None:
    made = recording()
    report = make_report(read_trace(save(tmp_path / "t", made.document())))
    assert [layer.routed for layer in report.layers] == made.routed
    hits = [r - w for r, w in zip(made.routed, made.waited, strict=True)]
    assert [layer.hits for layer in report.layers] == hits
    assert report.hit_rates["measured"] == pytest.approx(sum(hits) / sum(made.routed))


def test_parts_add_up_to_the_time(trace: Trace) -> None:
    time = make_report(trace).time
    assert time.tokens == 12
    assert sum(time.parts_ms.values()) == pytest.approx(time.mean_ms)
    assert time.parts_ms["device"] == pytest.approx(4 * 0.4)
    assert time.stall_ms > 0
    assert time.prompt_tokens == 5


def test_causes_share_a_stall_by_experts(tmp_path: Path) -> None:
    made = Recording()
    causes = {"late": 1, "evicted": 0, "unpredicted": 2}
    made.add("X", "stall", MAIN, 900.0, layer=0, group=0, experts=4, **causes)
    made.now += 1000.0
    made._end("token", 1000.0, request=1, token=2)
    parts = make_report(read_trace(save(tmp_path / "t", made.document()))).time.parts_ms
    assert parts["late"] == pytest.approx(0.225)
    assert parts["unpredicted"] == pytest.approx(0.45)
    assert parts["unknown"] == pytest.approx(0.225)


def test_waste_and_usefulness(trace: Trace) -> None:
    report = make_report(trace)
    guesses = report.speculation
    assert guesses.reads == len(trace.uses) + 1
    assert guesses.used_bytes == RECORD * len(trace.uses)
    assert guesses.evicted_unused_bytes == RECORD
    assert guesses.unused_bytes == 0
    assert guesses.waste == pytest.approx(1 / guesses.reads)
    assert guesses.lead_ms["p50"] == pytest.approx(0.43)
    shares = {(u.distance, u.rank): u.useful / u.guesses for u in report.usefulness}
    assert shares == {(1, 0): 1.0, (1, 1): 0.0, (2, 0): 1.0, (2, 1): 0.0}


def test_a_perfect_cache_is_no_worse_than_lru(trace: Trace) -> None:
    for layer in make_report(trace).layers:
        assert layer.belady_hits is not None and layer.lru_hits is not None
        assert layer.lru_hits <= layer.belady_hits <= layer.routed


def spoken(path: Path, stall: float, nbytes: int) -> str:
    """The sentence about a token of 1 ms."""
    made = Recording()
    made.add("X", "stall", MAIN, stall, layer=0, group=0, experts=1, late=1)
    made.add("X", "token", MAIN, 1000.0, request=1, token=1)
    made.add("X", "read", LANES[0], 900.0, layer=0, group=0, expert=1, bytes=nbytes)
    document = made.document() | {"moestream": {"bandwidth_bytes_per_s": BANDWIDTH}}
    return make_report(read_trace(save(path, document))).summary


def test_the_sentence_names_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t"
    assert "Computing limits" in spoken(path, 10.0, 100_000)
    assert "The drive limits" in spoken(path, 500.0, 950_000)
    assert "Waiting limits" in spoken(path, 500.0, 100_000)
    assert "50 % waiting for experts (mostly for reads that were still" in spoken(path, 500.0, 1)


def test_old_files_are_told_about_as_far_as_they_go(tmp_path: Path) -> None:
    made = recording()
    known = {
        "token": {"request", "token"},
        "prompt": {"request", "tokens"},
        "stall": {"layer", "experts"},
        "read": {"layer", "expert", "bytes"},
    }
    events = [
        event | {"args": {k: v for k, v in event["args"].items() if k in known[event["name"]]}}
        for event in made.events
        if event["name"] in known
    ]
    trace = read_trace(save(tmp_path / "old", {"traceEvents": events}))
    report = make_report(trace)
    assert report.time.stall_ms > 0
    assert report.layers[0].hits is None
    assert report.drive.nbytes > 0
    assert report.speculation.reads is None
    missing = "\n".join(report.missing)
    for word in ("routing", "predictions", "syncs", "bandwidth", "waste"):
        assert word in missing
    assert "cause not recorded" in page(trace, report)


def test_an_empty_trace_is_told_about(tmp_path: Path) -> None:
    trace = read_trace(save(tmp_path / "t", {"traceEvents": []}))
    report = make_report(trace)
    assert "neither a token nor a prompt" in report.summary
    assert "<svg" not in page(trace, report)
    json.dumps(report.to_json())


def test_a_trace_of_prompts_alone_is_told_about(tmp_path: Path) -> None:
    trace = read_trace(save(tmp_path / "t", recording(tokens=0).document()))
    report = make_report(trace)
    assert report.summary.startswith("A prompt chunk took")
    assert report.layers[0].routed == 6
    assert "prompt chunk" in page(trace, report)


def test_a_token_that_ends_a_prompt_is_no_decoding(tmp_path: Path) -> None:
    made = Recording()
    made.prompt(tokens=9)
    made.events[-1] |= {"name": "token", "args": {"request": 1, "token": 3}}
    for _ in range(3):
        made.token()
    report = make_report(read_trace(save(tmp_path / "t", made.document())))
    assert (report.time.tokens, report.time.prompt_tokens) == (3, 9)
    assert [layer.routed for layer in report.layers] == made.routed


# -- series ---------------------------------------------------------------------------------------


def test_covered_counts_overlaps_once() -> None:
    assert covered([Span(0, 10, 1), Span(5, 10, 2), Span(6, 1, 3), Span(20, 5, 1)]) == 20


def test_rates_keep_every_byte() -> None:
    trace = Trace(Path("t"))
    trace.reads = [Read(10.0 * n, 35.0, 1, 0, 0, n, 1000, bool(n % 2), None) for n in range(50)]
    bins = rates(trace, 0.0, 600.0)
    assert sum(a + b for a, b in bins) * 600 / len(bins) / 1e6 == pytest.approx(50_000)


def test_depths_last_until_they_change() -> None:
    bins = deepest([Depth(0.0, 3, 1), Depth(50.0, 0, 0)], 0.0, 100.0)
    assert bins[len(bins) // 4] == (3.0, 1.0)
    assert bins[-1] == (0.0, 0.0)


def test_quantiles_and_histograms() -> None:
    assert quantile([], 0.5) == 0
    assert quantile([3, 1, 2], 0.5) == 2
    assert histogram([0.5, 1.5, 1.6, 99], [1, 2, 3]) == [3, 1]


@pytest.mark.parametrize("high", [1e-6, 0.3, 1, 7, 99, 1234.5, 1e9])
def test_ticks_are_few_and_inside(high: float) -> None:
    values = ticks(0, high)
    assert 2 <= len(values) <= 6
    assert values[-1] <= high * 1.0001


# -- the files ------------------------------------------------------------------------------------


def test_the_page_is_whole_and_fetches_nothing(trace: Trace) -> None:
    text = page(trace, make_report(trace))
    assert "tiny &lt;moe&gt;" in text and "<moe>" not in text
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    for heading in ("Where the time went", "Hits by layer", "Usefulness", "Queue", "Waste"):
        assert heading in text
    assert "nan" not in text.lower().split("</style>")[1]
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(svg)


def test_the_perfetto_file_names_tracks_and_nests(trace: Trace) -> None:
    events = perfetto_events(trace)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[COMPUTE] == "compute"
    assert [names[FIRST_LANE + n] for n in range(3)] == ["lane 0", "lane 1", "lane 2"]
    timed = [event for event in events if "ts" in event]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert {"i", "C", "X", "s", "f", "M"} == {event["ph"] for event in events}
    ends: list[float] = []
    for event in timed:
        if event["ph"] == "X" and event["tid"] == COMPUTE:
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-2
            ends.append(event["ts"] + event["dur"])


def test_arrows_go_from_a_guess_to_its_use(trace: Trace) -> None:
    events = perfetto_events(trace)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(trace.uses) > 3
    for (read, use), number in zip(guesses_used(trace), sorted(starts), strict=True):
        assert (read.group, read.expert) == (use.group, use.expert)
        assert read.ts <= starts[number]["ts"] <= read.end
        assert ends[number]["ts"] == use.ts
        assert any(token.ts <= use.ts <= token.end for token in trace.tokens)
        assert ends[number]["bp"] == "e"


def test_files_that_cannot_be_written_are_an_error(trace: Trace, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ReportUnwritable, match="cannot write a report"):
        write_report(trace, make_report(trace), tmp_path / "taken")


# -- the command ----------------------------------------------------------------------------------


def call(*arguments: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result.stdout, result.stderr


def test_report_writes_both_files(file: Path, tmp_path: Path) -> None:
    output, errors = call("report", str(file), "--out", str(tmp_path / "a" / "b"))
    assert output.startswith("A token took")
    assert errors == ""
    json.loads((tmp_path / "a" / "b" / "trace.json").read_text())
    assert (tmp_path / "a" / "b" / "report.html").read_text().startswith("<!doctype html>")


def test_report_prints_figures_as_an_object(file: Path) -> None:
    output, _ = call("report", str(file), "--json")
    figures = json.loads(output)
    assert figures["time"]["tokens"] == 12
    assert figures["layers"][0]["hits"] <= figures["layers"][0]["routed"]
    assert {"summary", "drive", "speculation", "usefulness", "hit_rates"} <= figures.keys()


def test_report_says_what_is_missing(tmp_path: Path) -> None:
    made = Recording()
    made._end("token", 0.0, request=1, token=1)
    _, errors = call(
        "report", str(save(tmp_path / "t", {"traceEvents": made.events})), "--out", str(tmp_path)
    )
    assert "no routing" in errors


def test_report_wants_somewhere_to_write(file: Path) -> None:
    _, errors = call("report", str(file), code=2)
    assert "--out" in errors


def test_an_unreadable_trace_is_one_line(tmp_path: Path) -> None:
    _, errors = call("report", str(tmp_path / "absent"), "--json", code=1)
    assert errors.count("\n") == 1
    assert errors.startswith("error: cannot read the trace")
