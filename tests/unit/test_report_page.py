"""``autopar report``: the page is whole, needs nothing else, shows the plan's numbers, and looks right in a browser."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from command_line import command, plan_all

from autopar.cli.common import opened
from autopar.report.layouts import LayoutRow, with_front
from autopar.report.page.block_cards import COLOURS
from autopar.report.page.gantt import gantt, is_aggregated
from autopar.report.page.html_page import Subject, html_page
from autopar.report.page.link_load import link_kinds
from autopar.report.page.memory_chart import CATEGORIES, by_category, fullest
from autopar.report.page.seconds_spent import step_parts, tallies
from autopar.report.page.seconds_table import COLOURS as SECONDS_COLOURS
from autopar.report.page.tradeoff import THIS, alternatives_section
from autopar.words.texts import show_bytes, show_seconds
from cost_models.mesh_links import link_bytes
from cost_models.schedules import build, simulate
from hardware_profiles import load_cluster

VOID = {"meta", "link", "br", "rect", "path", "circle", "polygon", "line"}
KINDS = {
    "mesh": ("-c", "local-x4", "--mesh", "data=2,tensor=2", "--pin", "layers.*.up:tensor=n"),
    "piped": ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "zb-h1"),
    "folded": ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "zb-v"),
    "again": ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "1f1b", "--recompute", "layers.*"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a plan of each kind."""
    return plan_all(tmp_path_factory.mktemp("plans"), KINDS)


def subject_of(folder: Path, kind: str, name: str = "net") -> Subject:
    captured, asked = opened(folder / f"{kind}.json", trust=True)
    return Subject(name, captured.graph, asked.graphs, *asked.simulated(), asked.cluster)


class Tags(HTMLParser):
    """Checks that every element is closed, in order, and keeps attributes and what scripts there are."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        assert len({key for key, _ in attrs}) == len(attrs), (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.getpos())


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_whole_and_needs_nothing(folder: Path, kind: str) -> None:
    code, out, err = command("report", folder / f"{kind}.json", "-o", folder / f"{kind}.html", "--trust")
    assert code == 0, err
    page = (folder / f"{kind}.html").read_text()
    assert f"{kind}.html" in out
    tags = Tags(page)
    for tag, key, value in tags.attributes:
        if key in ("href", "src", "action", "data", "srcset", "poster"):
            assert value.startswith(("#", "data:,")), (tag, key, value)
    assert not re.search(r"(?i)https?://|@import|url\(", page)
    targets = {value for _, key, value in tags.attributes if key == "id"}
    assert {value[1:] for _, key, value in tags.attributes if key == "href" and value[0] == "#"} <= targets


@pytest.mark.parametrize("kind", KINDS)
def test_its_numbers_are_those_of_the_plan(folder: Path, kind: str) -> None:
    subject = subject_of(folder, kind)
    plan = subject.plan
    exact = [float(x) for x in re.findall(r'data-exact="([^"]+)"', html_page(subject))]
    assert exact[:3] == [plan.seconds, plan.memory_bytes, plan.n_devices]
    of_stages = tallies(subject.graphs, plan, subject.cluster)
    parts = step_parts(plan, subject.timeline, of_stages)
    assert sum(parts.values()) == pytest.approx(plan.seconds, rel=1e-9), "the seconds of a step are all explained"
    assert min(parts.values()) > 0
    for tally, stage in zip(of_stages, plan.stages, strict=True):
        price = stage.price
        each = sum(seconds for kind, seconds in tally.seconds.items() if kind.endswith(", of parameters"))
        waits = sum(tally.once.values()) + stage.microbatches * each
        assert waits == pytest.approx(price.exposed_seconds + price.optimizer_seconds, rel=1e-9)
    moved = {kind for kind in parts if " over " in kind}
    assert moved or kind != "mesh"
    assert any(link.used for link in link_kinds(subject.graphs, plan, subject.cluster, of_stages))


def test_stages_of_one_device_are_fullest_one_at_a_time(folder: Path) -> None:
    plan = subject_of(folder, "folded").plan
    assert len(plan.stages) == 4 and plan.schedule.n_ranks == 2
    assert max(fullest(plan, group) for group in range(2)) == plan.memory_bytes
    assert max(sum(by_category(plan, group).values()) for group in range(2)) == plan.memory_bytes
    stages = plan.schedule.stages_of_rank[0]
    assert fullest(plan, 0) < sum(plan.stages[s].price.memory_bytes for s in stages)


def test_a_folder_is_no_page(folder: Path) -> None:
    code, _, err = command("report", folder / "mesh.json", "-o", folder)
    assert code == 2 and "which is a folder; give a file" in err.replace("\n", " ")


def test_plans_show_themselves_in_notebooks(folder: Path) -> None:
    plan = replace(subject_of(folder, "piped").plan, cluster="<script>")
    html = plan._repr_html_()
    Tags(html)
    assert "<script" not in html and show_seconds(plan.seconds) in html
    assert all(show_bytes(stage.price.memory_bytes) in html for stage in plan.stages)
    text = str(plan)
    assert show_seconds(plan.seconds) in text and len(repr(plan).splitlines()) == 1 < len(text.splitlines())
    assert all(show_bytes(stage.price.memory_bytes) in text for stage in plan.stages)


def test_names_cannot_run(folder: Path) -> None:
    page = html_page(subject_of(folder, "mesh", '<script>alert(1)</script>"\' onload=x \x1b[2J\x07\u202e\ud800'))
    assert page.count("<script") == 1 and "&lt;script&gt;alert(1)" in page
    assert page.replace("\n", "").isprintable() and "\\x1b[2J\\x07\\u202e\\ud800" in page
    Tags(page)


def test_long_schedules_are_histograms(folder: Path) -> None:
    """A page stays small however many microbatches a step has, and the histogram adds up to what groups compute."""
    subject = subject_of(folder, "piped")
    schedule = build("1f1b", 2, 2, 4000)
    timeline = simulate(schedule, subject.timeline.times)
    plan = replace(subject.plan, schedule=schedule, seconds=timeline.makespan_seconds)
    assert is_aggregated(timeline) and not is_aggregated(subject.timeline)
    lanes = gantt(plan, timeline, tallies(subject.graphs, plan, subject.cluster))
    assert len(lanes) < 100_000
    for group, text in enumerate(re.findall(r'data-busy="([^"]+)"', lanes)):
        busy = [int(n) for n in text.split(",")]
        share = timeline.busy_seconds[group] / timeline.makespan_seconds
        assert sum(busy) / len(busy) == pytest.approx(100 * share, abs=1.0)


def test_alternatives_are_points_and_rows() -> None:
    """The fastest stands furthest left and the smallest lowest; the page's own plan is marked; names are escaped."""
    rows = with_front([
        LayoutRow(THIS, 2.0, 0.1, 100.0, 1.0, 0.1), LayoutRow("tp<2>", 1.0, 0.1, 300.0, 1.0, 0.1),
        LayoutRow("slow", 3.0, 0.1, 200.0, 1.0, 0.1),
    ])  # fmt: skip
    html = alternatives_section(rows)
    Tags(html)
    points = re.findall(r'<svg x="([\d.]+)%" y="([\d.]+)%" class="dot (\w+)(?: picked)?"', html)
    assert sorted(points) == [("0.00", "0.00", "front"), ("100.00", "50.00", "beaten"), ("50.00", "100.00", "chosen")]
    assert "tp&lt;2&gt;" in html and "<2>" not in html


@pytest.mark.slow
def test_top_searches_again(folder: Path) -> None:
    code, _, err = command("report", folder / "piped.json", "-o", folder / "top.html", "--top", 3, "--trust")
    assert code == 0, err
    page = (folder / "top.html").read_text()
    Tags(page)
    assert page.count('class="dot ') >= 3 and page.count('class="dot chosen picked"') == 1


def test_a_ring_loads_its_links() -> None:
    """Of an all-reduce of B bytes over 8 devices, each sends 2 * 7/8 B on its way out."""
    cluster = load_cluster("dgx-h100")
    carried = link_bytes(cluster, {"data": 8}, range(8), {("data", "all_reduce"): 800.0, ("data", "all_to_all"): 80.0})
    out = {edge: n for edge, n in carried.items() if edge[0] in range(8)}
    assert list(out.values()) == [pytest.approx(1400 + 70)] * 8


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Linear RGB in Oklab, in which equal distances look alike (B. Ottosson, 2020)."""
    to_cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
              [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return np.cbrt(np.clip(rgb, 0, None) @ np.transpose(to_cones)) @ np.transpose(to_lab)


DEFICIENT = {  # linear RGB as it is seen without one kind of cone (Machado, Oliveira and Fernandes, 2009)
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
LEGENDS = {
    "time": ("F", "B", "I", "W", "FB", "X", "O", "t-again", "t-slices", "t-beside", "t-optimizer", "t-compute"),
    "memory": tuple(f"m-{c}" for c in CATEGORIES),
    "sharding": tuple(kind for kind, _ in COLOURS),
    "links": tuple(f"l-{k}" for k in range(6)),
}


@pytest.mark.parametrize(("scheme", "card"), [("light", "#ffffff"), ("dark", "#161d26")])
def test_each_category_has_a_colour_of_its_own(scheme: str, card: str) -> None:
    """No two on the page share one; those of a legend are far apart, also without one kind of cone; all stand out
    from the card by WCAG's contrast of 3."""
    palette = (Path(html_page.__code__.co_filename).parent / "palette.css").read_text()
    text = palette.split("@media")[0 if scheme == "light" else 1]
    colours = dict(re.findall(r"\.([\w-]+) \{ --c: (#[0-9a-f]{6}); \}", text))
    assert set(colours) == {kind for legend in LEGENDS.values() for kind in legend}
    assert set(SECONDS_COLOURS.values()) - {"idle", "t-later"} <= set(LEGENDS["time"])

    def linear(colour: str) -> np.ndarray:
        values = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
        return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)

    rgb = {kind: linear(colour) for kind, colour in colours.items()}
    weights = [0.2126, 0.7152, 0.0722]
    luminance = {kind: float(value @ weights) for kind, value in (rgb | {"card": linear(card)}).items()}
    for kind in colours:
        light, dark = sorted((luminance[kind], luminance["card"]), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, kind
    for a, b in itertools.combinations(colours, 2):
        together = any({a, b} <= set(legend) for legend in LEGENDS.values())
        assert np.linalg.norm(oklab(rgb[a]) - oklab(rgb[b])) >= (0.08 if together else 0.03), (a, b)
        for kind, matrix in DEFICIENT.items() if together else ():
            seen = [oklab(np.clip(np.array(matrix) @ rgb[k], 0, 1)) for k in (a, b)]
            assert np.linalg.norm(seen[0] - seen[1]) >= 0.04, (a, b, kind)


def test_the_page_says_what_is_trained(folder: Path) -> None:
    page = html_page(replace(subject_of(folder, "piped"), kind="Net", amount=1e12, price_per_hour=2.0))
    title = re.search(r"<title>(.*?)</title>", page)
    assert title and title[1].startswith("Net, ") and "batch 8, float32, on local-x4" in title[1]
    assert "PP 2 (zb-h1)" in page and "device-hours for 1T samples" in page and "at 2 for a device-hour" in page
    assert "layers.0 .. layers" not in page and re.search(r"layers? \d", page)


BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian's package is chromium)")
@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_in_a_browser(folder: Path, scheme: str) -> None:
    """Nothing is wrong on the console, nothing sticks out at the width of a phone or of a desk, all opened; keys move
    along a lane; both colour schemes apply."""
    rows = with_front([LayoutRow(THIS, 2.0, 0.1, 1e9, 1.0, 0.1, devices=4, words="DP 4"),
                       LayoutRow("another", 1.0, 0.1, 3e9, 1.0, 0.1, devices=4, words="TP 4")])  # fmt: skip
    subject = replace(subject_of(folder, "piped"), alternatives=rows, by_devices=rows)
    page = html_page(subject).replace("<details ", "<details open ")
    (folder / "real.html").write_text(page)
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)  # for the test's own script only
    frames = "".join(f'<iframe src="page.html" style="width:{w}px;height:900px"></iframe>' for w in (360, 1280))
    frames += '<iframe src="real.html"></iframe>'  # its policy lets its own style and script run
    probe = """<script>addEventListener("load", () => {
      const lane = document.querySelector("svg[data-lane]");
      lane.focus();
      lane.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
      document.querySelector("[data-zoom='16']").click();
      const wide = document.documentElement;
      document.querySelector(".dot.front").dispatchEvent(new MouseEvent("click", {bubbles: true}));
      const facts = [...document.querySelectorAll("[data-pick='layout'] .facts > div")];
      const shown = facts.filter((of_one) => !of_one.hidden);
      const cut = [...document.querySelectorAll(".wide")].filter((box) => box.scrollWidth > box.clientWidth + 1);
      if (shown.length !== 1 || !shown[0].textContent.includes("TP 4")) console.log("not picked", shown.length);
      if (cut.length) console.log("cut", cut[0].getAttribute("aria-label"));
      console.log("PROBE", wide.clientWidth, wide.scrollWidth, document.getElementById("readout").textContent,
                  "|", getComputedStyle(document.body).backgroundColor);
    });</script></body>"""
    (folder / "page.html").write_text(page.replace("</body>", probe))
    (folder / "frames.html").write_text(f"<!doctype html><body>{frames}</body>")
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         "--allow-file-access-from-files", "--window-size=1700,1000", f"--user-data-dir={folder / 'browser'}",
         f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--virtual-time-budget=4000",
         "--dump-dom", (folder / "frames.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    probes = [re.search(r"PROBE (\d+) (\d+) (.*) \| (.*?)\"", line) for line in said]
    assert len(said) == 2 and all(probes), done.stderr[-3000:]
    widths = sorted((int(m[1]), int(m[2])) for m in probes if m)
    assert widths[0][0] <= 360 < widths[1][0] <= 1280 and all(a == b for a, b in widths), widths
    grounds = {m[4] for m in probes if m}
    assert grounds == {"rgb(14, 19, 25)" if scheme == "dark" else "rgb(246, 247, 249)"}
    assert all("0F0" in m[3] for m in probes if m), "the first action of the first lane is read out"

