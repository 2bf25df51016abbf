"""Read random experts of models as the lanes of an engine do: bytes per second, reads per expert.

For comparing layouts of the same experts: in place, aligned in place, packed. Each round reads the
same random experts of each model once, by turns, with the page cache of its files dropped before.

    python scripts/bench_records.py MODEL MODEL ... --lanes 8 --experts 256 --rounds 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moestream.io.reader import RecordReader
from moestream.io.records import Record
from moestream.runtime.assembly import draw_blueprint, make_record
from moestream.runtime.slots import SlotPool
from moestream.runtime.streams import leased_streams


class Model:
    """A model's records, with a slot for each lane."""

    def __init__(self, directory: Path, *, lanes: int, direct: bool, checksum: bool) -> None:
        self.directory = directory
        blueprint = draw_blueprint(directory, widen=False, checksum=checksum)
        self.records: list[Record] = [make_record(blueprint, use.site) for use in blueprint.uses]
        self.calls = 0
        self.reader = RecordReader(self.records, direct=direct, preadv=self._preadv)
        self._pools = [SlotPool(record, lanes) for record in self.records]

    def _preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        return os.preadv(descriptor, buffers, offset)

    def drop_cache(self) -> None:
        """Forget what the system holds of the files."""
        for path in {run.path for record in self.records for run in record.runs}:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def measure(self, experts: Sequence[tuple[int, int]], lanes: int) -> float:
        """Bytes per second of one pass; jobs go to the lanes one by one, as in the engine."""
        self.drop_cache()
        jobs = [
            (group, expert, job)
            for group, expert in experts
            for job in range(len(self.records[group].jobs))
        ]
        # A slot of its own for each lane: nobody else may write to it until its read has ended.
        lane, numbers = threading.local(), itertools.count()

        def begin_lane() -> None:
            lane.slot = next(numbers)

        def read(job: tuple[int, int, int]) -> int:
            group, expert, number = job
            return self.reader.read_job(group, expert, number, self._pools[group].rows(lane.slot))

        begin = time.perf_counter()
        with ThreadPoolExecutor(lanes, initializer=begin_lane) as executor:
            nbytes = sum(executor.map(read, jobs))
        return nbytes / (time.perf_counter() - begin)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256, help="read in each pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-direct", action="store_true")
    parser.add_argument("--checksum", action="store_true", help="packed stores only")
    arguments = parser.parse_args()
    lanes = arguments.lanes
    with leased_streams():
        models = [
            Model(
                directory,
                lanes=lanes,
                direct=not arguments.no_direct,
                checksum=arguments.checksum,
            )
            for directory in arguments.models
        ]
        rates: dict[Path, list[float]] = {model.directory: [] for model in models}
        source = random.Random(0)
        for _ in range(arguments.rounds):
            every = [
                (group, expert)
                for group, record in enumerate(models[0].records)
                for expert in range(record.experts)
            ]
            chosen = source.sample(every, min(arguments.experts, len(every)))
            for model in models:
                rates[model.directory].append(model.measure(chosen, lanes))
        for model in models:
            record = model.records[0]
            passes = rates[model.directory]
            reads = model.calls / (len(passes) * min(arguments.experts, len(every)))
            result = {
                "model": str(model.directory),
                "lanes": lanes,
                "record_bytes": record.stored_bytes,
                "direct": bool(model.reader.direct_files),
                "reads_per_expert": round(reads, 2),
                "gb_per_s": [round(rate / 1e9, 3) for rate in passes],
                "median_gb_per_s": round(statistics.median(passes) / 1e9, 3),
            }
            print(json.dumps(result), flush=True)
            model.reader.close()


if __name__ == "__main__":
    main()
