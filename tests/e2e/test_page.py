"""The page in a real headless Chromium: how it looks, what it says to those who can't see it, what outages do to it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from diloco_node.cli.admin_client import Target
from diloco_node.cli.page.merged import MergedRegions, dashboard_server
from diloco_node.daemon.admin.page_files import page_with
from diloco_node.daemon.run_history import COLUMNS
from tests.kit.browser import Browser, Tab, chromium, needs_chromium
from tests.kit.page_kit import HOSTILE, LOST, NAMES, UNIX, ShownRun, shown, snapshot, status
from tests.kit.repository import ROOT
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.e2e, needs_chromium, pytest.mark.asyncio(loop_scope="module")]

AXE = ROOT / "tests/kit/axe.min.js"
LOOKS = [(width, scheme) for width in (400, 1280, 1920) for scheme in ("dark", "light")]
TAB_KEY, ENTER_KEY = ("Tab", 9), ("Enter", 13)


async def violations(tab: Tab) -> Any:
    """What axe-core finds: rules of WCAG and good practice."""
    await tab.evaluate(f"{AXE.read_text()};0")
    found = "v => [v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 200))]"
    return await tab.evaluate(f"axe.run().then(r => r.violations.map({found}))")


async def overflow(tab: Tab) -> int:
    """Pixels by which the page is wider than its window."""
    return int(await tab.evaluate("document.documentElement.scrollWidth - innerWidth"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """One for all tests; each has a profile of its own in it."""
    async with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Browser) -> AsyncIterator[Tab]:
    tab = await browser.tab()
    yield tab
    await tab.close()


async def open_wide(tab: Tab, url: str, **look: Any) -> None:
    await tab.look(**({"width": 1280} | look))
    await tab.open(url)


async def test_it_looks_right_in_six_ways(tab: Tab, tmp_path: Path) -> None:
    run = ShownRun()
    run.has_lost = True
    async with shown(run, tmp_path) as url:
        await open_wide(tab, url)
        await tab.until("document.querySelectorAll('.card').length === 2")
        for width, scheme in LOOKS:
            await tab.look(width=width, scheme=scheme)
            await tab.until(f"innerWidth === {width} && document.querySelector('#loss canvas')")
            picture = tmp_path / f"{width}-{scheme}.png"
            await tab.screenshot(picture)
            assert picture.stat().st_size > 20_000
            assert await overflow(tab) <= 0, (width, scheme)
            assert await violations(tab) == [], (width, scheme)
        assert HOSTILE in await tab.evaluate("document.body.innerText")
        assert tab.errors == []
        assert {one[: len(url)] for one in tab.loaded} == {url}, "nothing comes from elsewhere"


async def test_an_outage_appears_and_goes(tab: Tab, tmp_path: Path) -> None:
    run = ShownRun()
    async with shown(run, tmp_path) as url:
        await tab.open(url)
        await tab.until("document.querySelector('.pill')?.innerText.includes('healthy')")
        assert await tab.evaluate("document.querySelectorAll('.card').length") == 0
        top = await tab.evaluate("document.getElementById('top').innerText")
        assert "1 more region may fail before merging stops" in top
        assert "2 more learners may stop before none trains" in top
        assert "for 2 min, since " in top
        trained = await tab.evaluate("document.querySelector('#account tr').innerText")
        assert "no data" in trained, "what others trained is not known here"
        run.has_lost = True
        await tab.until("document.querySelector('.card.bad')")
        card = await tab.evaluate("document.querySelector('.card.bad').innerText")
        for part in ("severe", LOST, "A-PEER-DOWN", "connection refused", "diloco-node doctor", "Copy"):
            assert part in card
        row = await tab.evaluate(f"document.getElementById('region-{LOST}').innerText")
        assert "contributor" in row
        assert "waits for a link with its certificate" in row
        assert "2 voters, 2 must be there" in await tab.evaluate("document.getElementById('regions').innerText")
        assert "No region may fail" in await tab.evaluate("document.getElementById('top').innerText")
        run.has_lost = False
        await tab.until("!document.querySelector('.card')")
    # The daemon itself is gone, and comes back.
    await tab.until("document.querySelector('.card.bad')?.innerText.includes('Nothing has come for')")
    async with shown(run, tmp_path, port=int(url.rpartition(":")[2])):
        await tab.until("!document.querySelector('.card')")
        assert "healthy" in await tab.evaluate("document.querySelector('.pill').innerText")


async def test_events_are_marks_on_the_curves_and_their_list_can_be_filtered(tab: Tab, tmp_path: Path) -> None:
    async with shown(ShownRun(), tmp_path) as url:
        await open_wide(tab, url)
        await tab.until("document.querySelector('#loss canvas') && document.querySelector('.events li')")
        for chart in ("loss", "speed"):
            label = await tab.evaluate(f"document.querySelector('#{chart} .chart').ariaLabel")
            assert label.partition("Marks: ")[2].count("L") >= 10, "of the whole run, not of the last 64 notes"
            legend = await tab.evaluate(f"document.querySelector('#{chart} .legend').textContent")
            for meaning in ("R a start of a daemon", "L a leader was elected", "P a region left or came back"):
                assert meaning in legend
        kinds = "[...new Set([...document.querySelectorAll('.events .kind')].map(e => e.innerText.replace('! ', '')))]"
        everything = await tab.evaluate("document.querySelectorAll('.events li').length")
        await tab.evaluate("document.querySelector('[data-do=kind][data-name=peer]').click()")
        await tab.until(f"{kinds}.join() === 'peer'")
        assert await tab.evaluate("document.querySelectorAll('.events li').length") == 2
        assert "2 of 64" in await tab.evaluate("document.querySelector('#events .note').innerText")
        await tab.evaluate("document.querySelector('[data-do=only-alarms]').click()")
        await tab.until("document.querySelector('#events .empty')?.innerText === 'no alarms'")
        for action in ("kind][data-name=peer", "only-alarms"):
            await tab.evaluate(f"document.querySelector('[data-do={action}]').click()")
        await tab.until(f"document.querySelectorAll('.events li').length === {everything}")
        assert tab.errors == []


async def test_a_finished_run_shows_no_region_as_a_failure(tab: Tab, tmp_path: Path) -> None:
    over = snapshot(1_200, "us-east", has_lost=True)
    over["status"] |= {"state": "finished", "reason": "finished: enough steps", "rounds": []}
    over["status"]["health"] |= {"state": "finished", "line": "finished: enough steps", "alerts": []}
    ended = {"status": {"region": "eu-west", "error": "it did not end in order: there is no whole report.json"}}
    path = tmp_path / "report.html"
    path.write_text(page_with({"regions": [over, ended], "health": over["status"]["health"]}))
    await open_wide(tab, path.as_uri())
    await tab.until("document.querySelectorAll('#regions tbody tr').length === 3")
    states = await tab.evaluate("[...document.querySelectorAll('#regions [data-label=state]')].map(e => e.innerText)")
    assert states == ["■ gone: the run is over", "✓ finished", "■ gone: the run is over"]
    assert await tab.evaluate("document.querySelectorAll('#regions .bad, .card').length") == 0
    assert await tab.evaluate("document.querySelector('.pill').innerText") == "■ finished"
    assert "must be there" not in await tab.evaluate("document.getElementById('regions').innerText")
    assert tab.errors == []


async def test_the_keyboard_is_enough(tab: Tab, tmp_path: Path) -> None:
    run = ShownRun()
    run.has_lost = True
    async with shown(run, tmp_path) as url:
        await open_wide(tab, url, is_calm=True)
        await tab.until("document.querySelector('.card')")
        await tab.press(*TAB_KEY)
        assert await tab.evaluate("document.activeElement.innerText") == "To the content"
        for _ in range(40):
            if await tab.evaluate("document.activeElement.dataset.do === 'jump'"):
                break
            await tab.press(*TAB_KEY)
        asked = run.asked
        await eventually(lambda: run.asked > asked + 2)
        assert await tab.evaluate("document.activeElement.dataset.do") == "jump", "drawing again leaves the focus"
        await tab.press(*ENTER_KEY)
        await tab.until(f"document.activeElement.id === 'region-{LOST}'")
        await tab.evaluate("document.querySelector('[data-do=only-alarms]').focus()")
        await tab.press(*ENTER_KEY)
        await tab.until("document.querySelector('[data-do=only-alarms]').getAttribute('aria-pressed') === 'true'")
        kinds = "[...document.querySelectorAll('.events .kind')].map(e => e.innerText)"
        await tab.until(f"{kinds}.every(text => text.includes('digest'))")
        assert await tab.evaluate("getComputedStyle(document.querySelector('.dot')).animationName") == "none"
        assert tab.errors == []


async def test_ten_thousand_events_leave_the_page_as_large_as_it_was(tab: Tab, tmp_path: Path) -> None:
    async with shown(ShownRun(), tmp_path) as url:
        await open_wide(tab, url)
        await tab.until("document.querySelectorAll('.events li').length === 64")
        await tab.evaluate("document.querySelector('[data-do=all-rounds]').click()")
        await tab.until("document.querySelectorAll('.rounds tbody tr').length === 128")
        documents = json.dumps([status(at, has_lost=at % 2 == 0) for at in range(20_000, 20_050)])
        script = f"""(async () => {{
            const {{ receive }} = await import("/page/main.js");
            const documents = {documents};
            const nodes = [];
            for (let at = 0; at < 10000; at++) {{
                const one = documents[at % documents.length];
                one.clock.unix += at;
                one.notes.at(-1).text = `event ${{at}}`;
                one.notes.at(-1).at_ns += 1;
                receive("status", {{ regions: [one] }});
                if (at % 500 === 499) {{
                    await new Promise(requestAnimationFrame);
                    await new Promise(requestAnimationFrame);
                    nodes.push(document.querySelectorAll("*").length);
                }}
            }}
            const {{ store }} = await import("/page/store.js");
            return [nodes, store.regions.get("us-east").rows.length];
        }})()"""
        nodes, points = await tab.evaluate(script)
        assert len(nodes) == 20
        assert max(nodes[10:]) <= max(nodes[:10])
        assert points <= 1024
        assert tab.errors == []


# Each field of a document in turn is something else; what a part of the page throws, and what it makes of it.
SPOILED = """(async () => {
    const base = DOCUMENT;
    const store = await import("/page/store.js"), health = await import("/page/health.js");
    const charts = await import("/page/charts.js"), rounds = await import("/page/rounds.js");
    const tables = await import("/page/tables.js");
    const { drawTop, drawAlerts, drawFigures } = health, { drawMap, drawRounds } = rounds;
    const { drawRegions, drawBandwidth, drawAccount, drawEvents, drawSettings, drawFoot } = tables;
    const view = { allRounds: true, allSettings: true };
    const values = [null, 0, -1, true, "", "x", [], {}, [[]], [{}], [null], { a: {} }, [1e9]];
    values.push({ tag: "img", attributes: { src: "/page/icon.svg" }, children: [] });
    const paths = [];
    const walk = (value, path) => {
        if (path.length) paths.push(path);
        const names = Array.isArray(value) ? value.slice(0, 1).keys() : Object.keys(Object(value));
        if (typeof value === "object") for (const name of names) walk(value[name], [...path, name]);
    };
    walk(base, []);
    const found = [];
    for (const path of paths) for (const value of values) {
        const document_ = structuredClone(base);
        path.slice(0, -1).reduce((at, name) => at[name], document_)[path.at(-1)] = value;
        const draws = [drawTop, drawAlerts, drawFigures, charts.drawCharts, drawRegions, drawMap, drawRounds];
        draws.push(drawBandwidth, drawAccount, drawEvents, drawSettings, drawFoot);
        store.store.regions.clear();
        draws.unshift(() => store.begin({ regions: [document_] }));
        for (const draw of draws) try {
            draw(store.byName()[0], view);
        } catch (error) {
            found.push([path.join("."), value, String(error)]);
        }
        if (document.querySelector("img")) return [paths.length, [...found, [path.join("."), "an element"]]];
    }
    return [paths.length, found];
})()"""


async def test_what_a_document_holds_breaks_no_part_and_is_no_element(tab: Tab, tmp_path: Path) -> None:
    document = snapshot(150, has_lost=True)
    document["history"]["rows"] = document["history"]["rows"][:3]
    facts = document["status"]
    facts |= {"notes": facts["notes"][-2:], "round_log": facts["round_log"][-2:], "offers": [[0, 3, 10**9]]}
    facts |= {"learner_process": {"state": "running", "reason": "r"}, "budget_warning": "w"}
    async with shown(ShownRun(), tmp_path) as url:
        await tab.open(url)
        await tab.until("document.querySelector('.pill')")
        fields, found = await tab.evaluate(SPOILED.replace("DOCUMENT", json.dumps(document)))
        assert fields > 150
        assert found == []
    # The run is gone, and the page knows: no status of it comes after ours and is drawn instead.
    await tab.evaluate("import('/page/store.js').then(m => { window.store = m.store; })")
    await tab.until("!store.isOpen")
    # What stops even the making of a text stops one part.
    spoiled = status(1_300) | {"round_log": [], "reason": "still drawn"}
    spoiled["health"] |= {"state": {"toString": 0}}
    received = f"import('/page/main.js').then(m => m.receive('status', {{regions: [{json.dumps(spoiled)}]}}))"
    # It stays fresh: of a page that has heard nothing for a while that part is drawn without this field.
    await tab.evaluate(f"{received}.then(() => {{ store.heard = Infinity; }})")
    await tab.until("document.getElementById('regions').innerText.includes('still drawn')")


async def test_curves_and_rates_outlive_a_learner_and_a_clock(tab: Tab, tmp_path: Path) -> None:
    restarted = status(1_300) | {"inner_steps": 1_300}
    restarted["learner"] |= {"step": 3, "tokens": 1_536}
    late = status(1_301) | {"inner_steps": 1_301}
    late["learner"] |= {"step": 4}
    late["clock"]["unix"] -= 3_600
    async with shown(ShownRun(), tmp_path) as url:
        await open_wide(tab, url)
        await tab.until("document.querySelectorAll('.events li').length === 64")
        script = f"""(async () => {{
            const {{ receive }} = await import("/page/main.js");
            const {{ store, now }} = await import("/page/store.js");
            const region = store.regions.get("us-east");
            receive("status", {{ regions: [{json.dumps(restarted)}] }});
            const last = region.rows.at(-1);
            receive("status", {{ regions: [{json.dumps(late)}] }});
            return [last.slice(1, 3), now(), region.counters.length, region.rows.at(-1)[0]];
        }})()"""
        full = {
            "columns": list(COLUMNS),
            "period_s": 2,
            "rows": [[UNIX + one] * 3 + [one % 2] * 6 for one in range(1_024)],
        }
        halved = f"""import("/page/store.js").then(({{ begin, store }}) => {{
            begin({{ regions: [{{ status: {{ region: "x" }}, history: {json.dumps(full)} }}] }});
            const {{ rows, period }} = store.regions.get("x");
            return [rows.length, period, rows[0], rows.at(-1)];
        }})"""
        # Losses of steps and speeds are averaged; evaluations and counters are the later ones.
        values, first, last = [0.5, 1, 0.5, 1, 1, 1], [UNIX + 1] * 3, [UNIX + 1_023] * 3
        assert await tab.evaluate(halved) == [512, 4, [*first, *values], [*last, *values]]
        last, now, counters, at = await tab.evaluate(script)
        assert last == [1_300, 1_300 * 512], "of the run, as in the history"
        assert (now, counters, at) == (UNIX + 1_301 - 3_600, 1, UNIX + 1_301 - 3_600)
        await tab.until("document.querySelector('#region-us-east [data-label=step]').innerText === '1,301'")


async def test_an_outage_breaks_the_curve_of_speed_and_makes_one_bad_round(tab: Tab, tmp_path: Path) -> None:
    rounds = [{"outcome": "committed", "seconds": 1, "missing": ["eu"] if at in (2, 3, 4) else []} for at in range(6)]
    rounds += [{"outcome": "failed", "seconds": 1}, {"outcome": "committed", "seconds": 9}]
    async with shown(ShownRun(), tmp_path) as url:
        await open_wide(tab, url)
        line = """import("/page/charts.js").then(({ broken }) => {
            const { xs, ys } = broken({ xs: [0, 2, 4, 30, 32], ys: [5, 6, 7, 8, 9] }, 6);
            return [xs, ys];
        })"""
        assert await tab.evaluate(line) == [[0, 2, 4, 17, 30, 32], [5, 6, 7, None, 8, 9]]
        bad = f"""import("/page/rounds.js").then(({{ badRounds }}) => {{
            const log = {json.dumps(rounds)};
            return badRounds(log).map((one) => log.indexOf(one));
        }})"""
        assert await tab.evaluate(bad) == [2, 6, 7]


async def test_a_report_opens_from_the_disk_and_loads_nothing(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_with({"regions": [snapshot(7_200, name, has_lost=True) for name in NAMES]}))
    await open_wide(tab, page.as_uri(), width=400, scheme="dark")
    await tab.until("document.querySelectorAll('#loss .legend li svg').length === 7")
    lines = "[...document.querySelectorAll('#loss .legend li')].filter(e => e.innerText.includes('held out'))"
    dashes = f"{lines}.map(e => e.querySelector('line').getAttribute('stroke-dasharray'))"
    assert await tab.evaluate(dashes) == ["4 4"] * 4, "one of each region, and the merged model's"
    assert "report of" in await tab.evaluate("document.getElementById('top').innerText")
    assert f"{3 * 7_200 * 512:,}" in await tab.evaluate("document.querySelector('#account tr').innerText")
    assert "186 kB/s" in await tab.evaluate("document.getElementById('bandwidth').innerText"), "its mean"
    assert "behind" in await tab.evaluate("document.querySelector('#fragments svg').getAttribute('aria-label')")
    assert await overflow(tab) <= 0
    assert await violations(tab) == []
    assert tab.errors == []
    assert tab.loaded == [page.as_uri()]


async def test_the_merged_loss_is_that_of_the_last_evaluation_of_any_region(tab: Tab, tmp_path: Path) -> None:
    documents = [status(1_300, name) for name in NAMES]
    for document, loss, step in zip(documents, (1.5, 4.5, None), (1_250, 50, None), strict=True):
        document["learner"] |= {"val_loss_global": loss, "val_loss_global_step": step}
    page = tmp_path / "report.html"
    page.write_text(page_with({"regions": [{"status": document} for document in documents]}))
    await open_wide(tab, page.as_uri())
    await tab.until("document.getElementById('figures').innerText.includes('merged loss')")
    assert "merged loss\n1.500" in await tab.evaluate("document.getElementById('figures').innerText.toLowerCase()")


async def test_what_is_not_known_is_never_zero(tab: Tab, tmp_path: Path) -> None:
    document = {"region": "eu", "run_id": "new", "state": "starting", "reason": "waits for the learner"}
    page = tmp_path / "report.html"
    page.write_text(page_with({"regions": [{"status": document}]}))
    await open_wide(tab, page.as_uri())
    await tab.until("document.querySelector('#figures dd')")
    figures = dict(
        await tab.evaluate("[...document.querySelectorAll('.figure')].map(e => [...e.children].map(c => c.innerText))")
    )
    for name in ("step", "tokens merged", "tokens/s", "merged loss", "rounds merged", "time left", "leader"):
        assert figures[name] == "no data"
    for panel in ("loss", "speed", "fragments", "rounds", "bandwidth", "events", "settings"):
        assert "no data" in await tab.evaluate(f"document.getElementById('{panel}').innerText")
    assert "Failure tolerance: no data" in await tab.evaluate("document.getElementById('top').innerText")
    assert tab.errors == []


async def test_a_region_that_answers_late_has_its_name_its_history_and_its_settings(tab: Tab, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    async with shown(ShownRun(), tmp_path / "b") as url:
        late = int(url.rpartition(":")[2])
    async with shown(ShownRun(), tmp_path / "a") as first:
        targets = [Target(f"port {port}", port) for port in (int(first.rpartition(":")[2]), late)]
        async with dashboard_server(MergedRegions(lambda: targets), 0) as url:
            await tab.open(url)
            await tab.until(f"document.querySelector('.card.bad')?.innerText.includes('port {late} does not answer')")
            assert "1 of 4" in await tab.evaluate("document.getElementById('figures').innerText")
            async with shown(ShownRun(region="eu-west"), tmp_path / "b", port=late):
                await tab.until("document.getElementById('region-eu-west')?.innerText.includes('training')")
                await tab.until("document.querySelectorAll('.card').length === 0")
                await tab.until("document.getElementById('figures').innerText.includes('2 of 3')")
                script = "document.querySelector('#region-eu-west [data-do=region]').click()"
                await tab.evaluate(f"{script}; const past = performance.now.bind(performance); 0")
                await tab.evaluate("performance.now = () => past() + 60000; 0")
                await tab.until("/of eu-west[^]*sync_every/.test(document.getElementById('settings').innerText)")
                rows = "import('/page/store.js').then(m => m.store.regions.get('eu-west').rows.length)"
                assert await tab.evaluate(rows) > 100
            await tab.until("document.querySelector('.card.bad')?.innerText.includes('eu-west does not answer')")
        assert tab.errors == []


async def test_a_dashboard_shows_a_region_that_goes_and_comes_back(tab: Tab, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    async with shown(ShownRun(), tmp_path / "a") as first, shown(ShownRun(), tmp_path / "b") as second:
        ports = [int(url.rpartition(":")[2]) for url in (first, second)]
    regions = MergedRegions(lambda: [Target(str(port), port) for port in ports])

    class OldLeader(ShownRun):
        def status(self) -> dict[str, Any]:
            return super().status() | {"role": "leader", "leader": "eu-west"}

    east, west = ShownRun(), OldLeader(region="eu-west")
    async with dashboard_server(regions, 0) as url:
        async with shown(east, tmp_path / "a", port=ports[0]):
            async with shown(west, tmp_path / "b", port=ports[1]):
                await tab.open(url)
                await tab.until("document.querySelector('.pill')?.innerText.includes('healthy')")
                await tab.until("document.getElementById('figures').innerText.includes('2 of 3')")
                east.has_lost = west.has_lost = True
                await tab.until("document.querySelectorAll('.card').length === 2")
                cards = await tab.evaluate("document.getElementById('alerts').innerText")
                assert cards.count("A-PEER-DOWN") == 1, "what both say is said once"
            east.has_lost = False
            await tab.until("document.querySelector('.card.bad')?.innerText.includes('eu-west does not answer')")
            assert "healthy" in await tab.evaluate("document.querySelector('.pill').innerText")
            assert "as us-east saw" in await tab.evaluate("document.getElementById('rounds').innerText")
            figures = await tab.evaluate("document.getElementById('figures').innerText")
            assert "us-east" in figures, "who led before it went does not lead"
            step = await tab.evaluate("document.querySelector('#region-eu-west [data-label=step]').innerText")
            assert step != "no data", "what was last known stays"
        await tab.until("document.querySelector('.pill').innerText.includes('no answer')")
        assert "tolerance: no data" in await tab.evaluate("document.getElementById('top').innerText")
        async with shown(east, tmp_path / "a", port=ports[0]):
            await tab.until("document.querySelectorAll('.card').length === 1")
        assert tab.errors == []
