"""benchmarks/gpu.py without a GPU: its lines, what it makes of a profile, and a run on devices in software."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import gpu_trace
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "has_device", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == gpu.NO_DEVICE
    assert capsys.readouterr().out == "no GPU here that torch can use: nothing is checked\n"


@pytest.mark.parametrize(
    ("verdicts", "code"), [(["PASS", "SKIP"], 0), (["PASS", "FAIL"], 1), ([], 1)], ids=["right", "wrong", "nothing"]
)
def test_the_exit_code_says_whether_anything_failed(
    verdicts: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"name": "a", "verdict": verdict, "text": "", "figures": {}} for verdict in verdicts]
    monkeypatch.setattr(gpu, "has_device", lambda: True)
    monkeypatch.setattr(gpu, "run", lambda *_: lines)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "bits", "--json"])
    assert gpu.main() == code
    assert [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()] == verdicts


def test_a_check_that_breaks_is_a_failure_with_its_last_words() -> None:
    code = "import sys; print('{\"verdict\": \"PASS\"}'); sys.stderr.write('noise\\nBusError: no\\n'); sys.exit(3)"
    passed, failed = gpu.run("bits", [sys.executable, "-c", code], 60.0)
    assert passed == {"verdict": "PASS"}
    assert (failed["name"], failed["verdict"], failed["text"]) == ("bits", "FAIL", "ended with code 3 BusError: no")


def test_a_check_that_hangs_is_ended() -> None:
    (failed,) = gpu.run("bits", [sys.executable, "-c", "import time; time.sleep(600)"], 0.5)
    assert (failed["verdict"], failed["text"].strip()) == ("FAIL", "took more than 0 s")


def event(kind: str, name: str, start: float, *, tid: int = 1, duration: float = 1.0, correlation: int = 0) -> Any:
    arguments = {"correlation": correlation}
    return {"cat": kind, "name": name, "ts": start, "dur": duration, "tid": tid, "args": arguments}


def trace(*events: Any) -> gpu_trace.Trace:
    result = gpu_trace.Trace.__new__(gpu_trace.Trace)
    result._events = sorted(events, key=lambda one: float(one["ts"]))
    return result


def test_calls_count_where_the_thread_is_at_a_boundary() -> None:
    profile = trace(
        event("user_annotation", "boundary", 10.0, duration=5.0),
        event("user_annotation", "boundary", 30.0, duration=5.0),
        event("cuda_runtime", "cudaStreamSynchronize", 5.0),
        event("cuda_runtime", "cudaStreamSynchronize", 12.0),
        event("cuda_runtime", "cudaEventSynchronize", 12.5, tid=2),
        event("cuda_runtime", "cudaMemcpyAsync", 20.0, correlation=6),
        event("cuda_runtime", "cudaMemcpyAsync", 31.0, correlation=7),
        event("cuda_driver", "cuLaunchKernel", 33.0),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 32.0, tid=9, correlation=7),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 32.5, tid=9, correlation=6),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 33.5, tid=9, correlation=7),
    )
    assert profile.calls_inside("boundary") == {"cudaStreamSynchronize": 1, "cudaMemcpyAsync": 1, "cuLaunchKernel": 1}
    assert profile.calls_outside("boundary") == {"cudaEventSynchronize": 1}
    assert profile.pageable_copies("boundary") == 1


def test_gaps_are_where_no_stream_of_the_device_has_work() -> None:
    profile = trace(
        event("kernel", "a", 0.0, duration=1000.0),
        event("kernel", "b", 500.0, tid=2, duration=2000.0),
        event("gpu_memset", "c", 1200.0, duration=100.0),
        event("kernel", "d", 4500.0, duration=10.0),
        event("cpu_op", "e", 3000.0),
    )
    assert profile.device_gaps_ms() == [2.0]
    assert profile.device_busy_ms() == 2.51


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="devices in software need g++")
def test_all_that_has_no_driver_passes_on_devices_in_software() -> None:
    command = [
        sys.executable,
        "benchmarks/gpu.py",
        "--size",
        "small",
        "--import",
        "tests.kit.fakecuda.installed",
        "--json",
    ]
    command += ["--only", "bits,waits,checkpoint,eager,ranks"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    verdicts = {line["name"]: line["verdict"] for line in map(json.loads, result.stdout.splitlines())}
    passed = {name for name, verdict in verdicts.items() if verdict == "PASS"}
    assert passed == {"bits", "waits", "written", "ranks"}, result.stdout + result.stderr
    # What takes time says nothing here; its code has run.
    assert {name for name, verdict in verdicts.items() if verdict == "INFO"} >= {"checkpoint", "eager", "boundary"}
    assert result.returncode == 0


def test_a_check_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "has_device", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "bits,tim"])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == 2
    assert "--only tim: the checks are bits, waits, loop" in capsys.readouterr().err


def test_a_line_of_the_loop_runs_the_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names: list[str] = []
    monkeypatch.setattr(gpu, "has_device", lambda: True)
    monkeypatch.setattr(gpu, "run", lambda name, *_: names.append(name) or [])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "memory,bits,eager"])
    assert gpu.main() == 1  # nothing was said
    assert names == ["loop", "bits"]
