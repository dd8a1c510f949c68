"""The report in a real browser: from disk, on a desk, on a phone, in the dark and on paper."""

from __future__ import annotations

import base64
import csv
import re
from contextlib import contextmanager
from io import StringIO
from itertools import product

import lab_rows
import pytest
from rich.console import Console

from pipeline.lab.charts import Line, Spot, bars, lines, scatter
from pipeline.lab.jobs import OK
from pipeline.lab.metrics import spread
from pipeline.lab.report import _passes, as_html, best, by_workload, front, publish
from pipeline.lab.sweep import Row
from pipeline.lab.table import machine
from pipeline.lab.tables import as_csv, as_table, repeat, short, shown, with_unit

ABOUT = {"command": "headrace sweep kv_quality", "date": "2026-11-30 07:00"}
SIZES = {"desk": 1280, "phone": 390}
BOXES = """
const seen = [];
for (const svg of document.querySelectorAll('figure svg')) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect());
  const out = texts.filter(b => b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1
    || b.bottom > frame.bottom + 1).length;
  const small = Math.min(...texts.map(box => Math.min(box.width, box.height)));
  seen.push({width: frame.width, height: frame.height, texts: texts.length, out, small});
}
return {
  seen, wide: document.documentElement.scrollWidth - window.innerWidth,
  asked: performance.getEntriesByType('resource').map(entry => entry.name),
  ink: getComputedStyle(document.body).color, page: getComputedStyle(document.body).backgroundColor,
  label: getComputedStyle(document.querySelector('figure svg text')).fill,
};
"""

COVERED = """
const all = [...document.querySelectorAll('svg text')].map(text => [text.textContent, text.getBoundingClientRect()]);
const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2;
const along = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
return all.flatMap(([name, a], at) => all.slice(at + 1).filter(([, b]) => across(a, b) && along(a, b)).map(
  ([other]) => name + ' / ' + other));
"""
# as `sweep drafters` gave them: long names, and memory that is nearly the same for all but one
NEAR = {
    "copy_edit": (29.9, 744, 94.9, 744, 104.2, 745, 103.4, 746, 28.2, 1342),
    "json": (28.2, 764, 27.4, 762, 27.8, 765, 35.8, 761, 20.2, 1406),
    "chat": (25.7, 744, 28.2, 745, 29.2, 745, 27.8, 737, 25.6, 1394),
}
NAMES = (
    "none",
    "ngram",
    "suffix",
    "cascade order [grammar,suffix]",
    "two_model smollm2 bits 4 max 4",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    html = as_html(lab_rows.experiment(), lab_rows.rows(), ABOUT)
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(html, encoding="utf-8")
    return file


def test_it_says_how_many_tokens_were_scored(page):
    text = page.read_text("utf-8")
    assert "Quality is that of 498 tokens of our own text" in text and "512 tokens" not in text


@contextmanager
def screen(browser, width, scheme="light"):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("size", SIZES)
def test_it_opens_from_disk_and_everything_is_inside(browser, page, size):
    with screen(browser, SIZES[size]):
        browser.get(page.as_uri())
        found = browser.execute_script(BOXES)
    assert found["wide"] <= 0, "wider than the screen"
    assert found["asked"] == [], "something is loaded from elsewhere"
    assert browser.get_log("browser") == []
    # 3 pairs of axes, acceptance, widths and stages for each of two workloads
    assert len(found["seen"]) == 2 * (3 + 1 + 1 + 1)
    for drawing in found["seen"]:
        assert drawing["texts"] > 8 and drawing["out"] == 0, drawing
        assert drawing["small"] > 4 and 280 < drawing["width"] <= 480, drawing
    assert "7,200" in browser.find_element("tag name", "table").text


LONG = {
    "paths": [
        f"/home/somebody/models/mlx-community/SmolLM2-{n}M-Instruct-8bit" for n in (135, 360)
    ],
    "without a break": ["a" * 95, "b" * 95],
    "in the middle": [f"{'/models' * 9}/{n}{'/mlx' * 18}" for n in (135, 360)],
    "wide": ["日本語" * 9, "中文模型" * 9],
}


@pytest.mark.parametrize("names", LONG.values(), ids=LONG)
def test_long_names_stay_inside_and_are_told_apart(browser, tmp_path, names, recwarn):
    rows = [measured(number, f"model.name={name}") for number, name in enumerate(names, 1)]
    for row, rate in zip(rows, (30.0, 34.0), strict=True):
        row.result["contestants"] = [lab_rows.contestant("kv=native", rate, rate, rate)]
    html = as_html(lab_rows.experiment(), rows, ABOUT)
    assert [str(told.message) for told in recwarn if told.category is UserWarning] == []
    file = tmp_path / "report.html"
    file.write_text(html, encoding="utf-8")
    for width in (390, 500, 1200):
        with screen(browser, width):
            browser.get(file.as_uri())
            found = browser.execute_script(BOXES)
            covered = browser.execute_script(COVERED)
        assert found["wide"] <= 0, width
        assert [drawing["out"] for drawing in found["seen"]] == [0] * 6, width
        assert all(drawing["height"] > 150 for drawing in found["seen"])
        assert covered == [], width


@pytest.mark.parametrize("workload", NEAR)
def test_names_of_near_points_do_not_cover_each_other(browser, workload, tmp_path):
    figures = NEAR[workload]
    spots = [
        Spot(*spot, best=False) for spot in zip(NAMES, figures[::2], figures[1::2], strict=True)
    ]
    file = tmp_path / "near.html"
    file.write_text("<style>svg { width: 410px }</style>" + scatter(spots, "speed", "memory"))
    browser.get(file.as_uri())
    assert browser.execute_script(COVERED) == []


def test_it_follows_a_dark_screen(browser, page):
    with screen(browser, 1280, "dark"):
        browser.get(page.as_uri())
        found = browser.execute_script(BOXES)
    light = lambda colour: sum(map(int, re.findall(r"\d+", colour)[:3])) > 380  # noqa: E731
    assert light(found["ink"]) and light(found["label"]) and not light(found["page"])


def test_it_can_be_printed(browser, page):
    browser.get(page.as_uri())
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 9


def test_it_needs_nothing_from_elsewhere_and_says_what_was_asked():
    html = as_html(lab_rows.experiment(), lab_rows.rows(), ABOUT)
    links = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import', html)
    assert all((a or b).startswith("#") for a, b in links)
    assert "<script" not in html
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids)), "two drawings share an id"
    for row in lab_rows.rows():
        assert all(line in html for line in repeat(lab_rows.experiment(), row))
    assert "1 failed" in html and "heads of 16 have no 64" in html
    assert "1 BLAS thread of extension+scipy-openblas32 avx2." in html
    assert "long_prompt: best tokens a second in all: native, 33.0/s" in html


def test_names_and_reasons_are_text_not_markup():
    rows = lab_rows.rows()
    rows[-1].reason = "<script>alert(1)</script> & 'x'"
    rows[-1].own, rows[0].own = (rows[-1].reason,), ("model.name=<b>",)
    html = as_html(lab_rows.experiment(), rows, ABOUT)
    assert "<script" not in html and "<b>\n" not in html
    assert "&lt;script&gt;" in html


def test_a_sweep_in_which_all_failed_still_has_a_report():
    html = as_html(lab_rows.experiment(), lab_rows.rows()[-1:], ABOUT)
    assert "<svg" not in html and "1 failed" in html


def test_the_front_is_what_no_other_point_beats():
    spots = front(lab_rows.rows()[:6], "tokens_per_s", "kv_bytes_per_token")
    assert {spot.label for spot in spots if spot.best} == {
        "native",
        "rotated k_bits 4 v_bits 3",
        "kv4",
    }
    assert len(spots) == 6


def test_short_names_keep_what_tells_points_apart():
    assert short(["kv=kv4", "kv.bits=2", "workload=chat"]) == "kv4 bits 2"
    assert short(["tier=[ram,disk]"]) == "[ram,disk]"
    assert short(["workload=chat"]) == "workload=chat"
    assert short([r"model.name=a\ v1.5 c\,d", "drafter='x y'"]) == "name a v1.5 c,d x y"


def test_figures_are_shown_with_what_can_be_read_of_them():
    assert [shown("kl", 0.00031), shown("top1", 0.914), shown("peak_mb", 1234.5)] == [
        "0.00031",
        "91",
        "1,234",
    ]
    assert [with_unit("ttft_ms", 3.14159), with_unit("tokens_per_s", None)] == ["3.14 ms", "–"]
    assert [shown("seconds", value) for value in (0.0186, 2, 12.345, 0)] == [
        "0.0186",
        "2.00",
        "12.3",
        "0.00",
    ]
    text = as_csv(lab_rows.experiment(), lab_rows.rows())
    head = "number,point,workload,status,reason,known,when,kv,kv.k_bits,kv.v_bits,model,tokens"
    assert text.splitlines()[0].startswith(head)
    table = list(csv.DictReader(StringIO(text)))
    assert len(table) == 13
    settings = ("workload", "kv", "kv.k_bits", "kv.v_bits", "model")
    assert [table[2][key] for key in settings] == ["long_prompt", "rotated", "4", "3", ""]


def test_the_terminal_table_shows_brackets_as_they_are():
    console = Console(width=160, file=StringIO())
    rows = lab_rows.rows()
    rows[0].own = ("tier=[ram,disk]",)
    console.print(as_table(lab_rows.experiment(), rows))
    said = console.file.getvalue()
    assert "[ram,disk]" in said and "failed:" in said and "copy_edit" in said


def measured(number, label):
    """A row of its own."""
    made = lab_rows.contestant("kv=native", 30.0, 64.0, 0.0)
    own = tuple(label.split(" "))
    row = Row(number, own, own, "d", "chat", OK)
    row.result = {"machine": machine(1), "contestants": [made]}
    return row


def test_what_is_known_bears_its_date_and_other_machines_are_said():
    rows = lab_rows.rows()
    assert "measured before" not in as_html(lab_rows.experiment(), rows[-1:], ABOUT)
    for row in rows[1:3]:
        row.known, row.when = True, f"2026-11-2{row.number} 10:00:00"
    rows[3].result["machine"] = {**machine(1), "cpu": "Z80"}
    html = as_html(lab_rows.experiment(), rows, ABOUT)
    assert "2 of its points were measured before" in html
    assert html.count("<small>measured 2026-11-2") == 2
    assert "2026-11-22 10:00:00 at the earliest" in html
    assert "different machines" in html and "Points 4: Z80, " in html
    console = Console(width=400, file=StringIO())
    console.print(as_table(lab_rows.experiment(), rows))
    assert "known, of 2026-11-22" in console.file.getvalue()
    assert "2026-11-22 10:00:00" in as_csv(lab_rows.experiment(), rows)


def test_workloads_that_are_asked_otherwise_are_not_weighed_against_each_other():
    rows = [
        measured(n + 1, f"drafter={drafter} workload.requests=2 workload.temperature={heat}")
        for n, (drafter, heat) in enumerate(product(("none", "suffix"), (0, 0.8)))
    ]
    rows[0].result["contestants"][0]["figures"]["tokens_per_s"] = spread([50.0])
    found = by_workload(rows)
    assert {name: [row.number for row in some] for name, some in found.items()} == {
        "chat, temperature=0": [1, 3],
        "chat, temperature=0.8": [2, 4],
    }
    assert list(best(lab_rows.experiment(), rows)) == [
        "chat, temperature=0: best tokens a second in all: none requests 2 temperature 0, 50.0/s."
    ]


def test_a_pass_is_pooled_over_who_drafts_and_nothing_else():
    rows = [
        measured(1, "drafter=ngram depth.max=4"),
        measured(2, "drafter=two_model draft_model=smollm2"),
        measured(3, "device.threads=2"),
        measured(4, "stage.chunked_prefill.chunk=64 limits.max_rows=2"),
    ]
    found = _passes(rows)
    assert set(found) == {
        "kv native, 1 row", "threads 2, 1 row", "chunk 64 max_rows 2, 1 row",
    }  # fmt: skip
    assert found["kv native, 1 row"][1][0] == 2 * found["threads 2, 1 row"][1][0]


def test_passes_of_different_machines_are_different_lines():
    rows = [measured(n, f"drafter=ngram depth.max={n}") for n in (1, 2, 3, 4)]
    one = machine(1)
    assert set(_passes(rows)) == {"kv native, 1 row"}
    rows[1].result["machine"] = {**one, "cpu": "Z80", "cores": 1}
    rows[2].result["machine"] = {**one, "packages": {**one["packages"], "mlx": "9.9"}}
    rows[3].contestant["blas"] = "none of ours"
    found = _passes(rows)
    assert len(found) == 4, "neither another machine's nor another software's is pooled"
    z80, mlx, blas = "kv native, 1 row, Z80, mlx ", ", mlx 9.9, ", "none of ours"
    names = list(found)
    assert names[1].startswith(z80) and mlx in names[2] and names[3].endswith(blas)
    assert "cores" not in "".join(names), "what tells them apart is said, and no more"


def test_one_measurement_is_one_pass_however_many_points_it_is():
    rows = lab_rows.rows()[:2]
    rows[1].result, rows[1].reason = rows[0].result, "the same configuration as point 1"
    (seen,) = _passes(rows).values()
    assert {rounds for rounds, _ in seen.values()} == {9}


def test_whose_figures_a_point_has_is_said_where_it_is_shown():
    rows = lab_rows.rows()
    rows[1].reason = "the same configuration as point 1"
    console = Console(width=400, file=StringIO())
    console.print(as_table(lab_rows.experiment(), rows))
    assert console.file.getvalue().count(rows[1].reason) == 1
    assert f"<small>{rows[1].reason}</small>" in as_html(lab_rows.experiment(), rows, ABOUT)


def test_a_chart_that_cannot_be_drawn_leaves_no_tables(tmp_path):
    rows = lab_rows.rows()
    del rows[0].contestant["widths"]
    with pytest.raises(KeyError):
        publish(tmp_path, lab_rows.experiment(), rows, ABOUT)
    assert list(tmp_path.iterdir()) == []


def test_dollars_in_a_name_are_dollars():
    name = r"$\frac$ x"
    drawn = [
        scatter([Spot(name, 1.0, 2.0, True), Spot("b", 2.0, 1.0, True)], "x", "y", name),
        lines([Line(name, [1, 2], [1, 2])], "x", "y", name),
        bars([name], {"verify": [1.0]}, "x", name),
    ]
    assert all(f">{name}</text>" in svg for svg in drawn)


def test_lines_that_cover_each_other_are_all_seen():
    same = [Line(f"{n}", [1, 2, 3], [90, 80, 70 + n / 20]) for n in range(6)]
    short, apart = Line("short", [1, 2], [90, 80]), Line("apart", [1, 3], [90, 50])
    svg = lines([*same, short, Line("last", [1, 2, 3], [90, 80, 70]), apart], "x", "y")
    widths = re.findall(
        r'd="[^"]+" style="fill: none; stroke: var\(--s\d\); stroke-width: ([\d.]+)', svg
    )
    drawn, legend = list(map(float, widths[:9])), list(map(float, widths[9:]))
    assert drawn == sorted(drawn, reverse=True)
    assert len(set(drawn)) == 8 and drawn[-2:] == [1.5, 1.5]
    assert legend == [1.5] * 9
