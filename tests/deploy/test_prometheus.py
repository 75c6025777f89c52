"""Alerts and dashboard: promtool reads them, their metrics are exported, and a real Prometheus scrapes a daemon."""

import asyncio
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from diloco_node.daemon import node as node_module
from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.spec import NodeSpec
from diloco_node.state_names import ADMIN_PORT_NAME
from tests.daemon.admin.test_metrics import families
from tests.kit.daemon_kit import Learner, end, nodes, spec  # noqa: F401 - two are fixtures
from tests.kit.ports import free_port
from tests.kit.repository import ROOT
from tests.kit.waiting import eventually

DEPLOY = ROOT / "deploy"


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: NOT CHECKED (.ci/system installs Debian's prometheus)")
    return found


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return document


def dashboard_queries() -> list[str]:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return queries + [one["expr"] for one in dashboard()["annotations"]["list"]]


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\bdiloco_[a-z_]+", text))


def test_promtool_takes_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    promtool = tool("promtool")
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    shutil.copy(ROOT / "tests" / "deploy" / "alerts_test.yml", tmp_path)
    for words in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run([promtool, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(dashboard_queries())]
    assert len(rules) >= 18
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([tool("promtool"), "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_can_be_cut_down_to_runs_and_regions() -> None:
    names = [one["name"] for one in dashboard()["templating"]["list"]]
    assert names == ["datasource", "run", "region"]
    for query in dashboard_queries()[:-1]:
        assert query.count('run=~"$run", region=~"$region"') == len(re.findall(r"diloco_[a-z_]+\{", query)), query
    places = [tuple(panel["gridPos"].values()) for panel in dashboard()["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["fieldConfig"]["defaults"]["noValue"] == "no data" for panel in dashboard()["panels"])


def test_every_alert_says_where_and_what_to_do() -> None:
    text = (DEPLOY / "alerts.yml").read_text()
    alerts = re.split(r"\n      - alert: ", text)[1:]
    assert len(alerts) >= 12
    for alert in alerts:
        assert "summary:" in alert
        assert "action:" in alert
        assert re.search(r"severity: (critical|warning)", alert)


def test_every_metric_of_rules_and_dashboard_is_exported() -> None:
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    exported = {family.name + ending for family in families() for ending in endings.get(family.type, ("",))}
    wanted = metrics_in((DEPLOY / "alerts.yml").read_text()) | set().union(*map(metrics_in, dashboard_queries()))
    assert len(wanted) > 15
    assert wanted - exported == set()


async def test_a_real_prometheus_scrapes_a_real_daemon_and_takes_every_query(
    spec: NodeSpec,  # noqa: F811
    nodes: list[node_module.Node],  # noqa: F811
    tmp_path: Path,
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    await eventually(lambda: (spec.state_dir / ADMIN_PORT_NAME).exists())
    try:
        await scraped_by_prometheus(tmp_path, int((spec.state_dir / ADMIN_PORT_NAME).read_text()))
    finally:
        await learner.close()
        assert await end(daemon, running) == 0


async def scraped_by_prometheus(folder: Path, admin: int) -> None:
    """A Prometheus with our rules sees the daemon, its labels and its metrics."""
    prometheus = tool("prometheus")
    port = free_port()
    target = {"targets": [f"127.0.0.1:{admin}"], "labels": {"run": "run", "region": "a"}}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "scrape_configs": [{"job_name": "diloco", "static_configs": [target]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        prometheus, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(120):
            while not (found := await asyncio.to_thread(query, port, 'diloco_ledger_term{run="run"}')):
                assert process.returncode is None
                await asyncio.sleep(0.2)
        assert found[0]["metric"]["region"] == "a"
        assert (await asyncio.to_thread(query, port, 'up{job="diloco"}'))[0]["value"][1] == "1"
        for one in dashboard_queries():
            await asyncio.to_thread(query, port, one.replace("$run", ".*").replace("$region", ".*"))
    finally:
        process.terminate()
        await process.wait()


def query(port: int, text: str) -> list[dict[str, Any]]:
    """What Prometheus answers; empty as long as it does not. A query that it refuses is an error."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it starts
            return []
        raise AssertionError(f"{text}: {error.read().decode()}") from None
    except OSError:
        return []
