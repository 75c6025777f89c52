"""What torch's profiler saw: calls into the driver by thread, and when the device did nothing."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity

CALLS: Final = ("cuda_runtime", "cuda_driver", "hip_runtime")
WORK: Final = ("kernel", "gpu_memcpy", "gpu_memset")


class Trace:
    """A profile as context manager; read it afterwards.

    Args:
        is_annotated: operators and `record_function` as well, which slows the loop down.
    """

    def __init__(self, *, is_annotated: bool = True) -> None:
        activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if is_annotated else [])]
        self._profile = torch.profiler.profile(activities=activities)
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Trace:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize()
        self._profile.__exit__(*error)
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        self._events = sorted((one for one in events if "dur" in one), key=lambda one: float(one["ts"]))

    def _of(self, *kinds: str) -> list[dict[str, Any]]:
        return [one for one in self._events if one.get("cat") in kinds]

    def _inside(self, annotation: str) -> list[dict[str, Any]]:
        """Calls into the driver, by the thread that has the annotation and while it has it."""
        spans = [one for one in self._of("user_annotation", "cpu_op") if one["name"] == annotation]
        inside, at = [], 0
        for call in self._of(*CALLS):
            while at < len(spans) and spans[at]["ts"] + spans[at]["dur"] < call["ts"]:
                at += 1
            if at < len(spans) and call["tid"] == spans[at]["tid"] and spans[at]["ts"] <= call["ts"]:
                inside.append(call)
        return inside

    def calls_inside(self, annotation: str) -> Counter[str]:
        """How often each call was made there."""
        return Counter(one["name"] for one in self._inside(annotation))

    def calls_outside(self, annotation: str) -> Counter[str]:
        """How often each call was made by other threads."""
        threads = {one["tid"] for one in self._of("user_annotation", "cpu_op") if one["name"] == annotation}
        return Counter(one["name"] for one in self._of(*CALLS) if one["tid"] not in threads)

    def pageable_copies(self, annotation: str) -> int:
        """How many copies of the calls there are from or to memory that is not page-locked."""
        ordered = {one.get("args", {}).get("correlation") for one in self._inside(annotation)}
        copies = [one for one in self._of("gpu_memcpy") if "Pageable" in one["name"]]
        return sum(one.get("args", {}).get("correlation") in ordered for one in copies)

    def device_busy_ms(self) -> float:
        """How long any stream of the device had work."""
        work = self._of(*WORK)
        if not work:
            return 0.0
        return (max(one["ts"] + one["dur"] for one in work) - work[0]["ts"]) / 1e3 - sum(self.device_gaps_ms())

    def device_gaps_ms(self) -> list[float]:
        """The times between two pieces of work on the device."""
        gaps, end = [], None
        for one in self._of(*WORK):
            if end is not None and one["ts"] > end:
                gaps.append((one["ts"] - end) / 1e3)
            end = max(end or 0.0, one["ts"] + one["dur"])
        return gaps
