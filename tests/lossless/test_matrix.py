"""The matrix (docs/matrix.md): a cover of it is run here, `make matrix` runs all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations, product

import pytest

from pipeline.cli import main
from pipeline.lab.matrix import cells as axes_of
from pipeline.lab.matrix import run
from pipeline.lab.matrix.cells import Axes, AxisError, Cell, Heads, cells, pairwise
from pipeline.lab.matrix.page import page
from pipeline.lab.matrix.trial import Trial, alone
from pipeline.lab.matrix.worker import Outcome, Worker
from stages.drafters.neural import tiny
from stages.drafters.ngram import NGramRow

SIDES = ("drafter", "kv", "family", "tier", "constraint", "rows")
SPARED = ("none", "random", "auto")  # plain decoding, no model, and another's name
COVERED = [  # one of each kind of codes and of layers: the others are in the whole
    "family=llama,gemma4,deepseek_v3,qwen3_5",  # dense, sliding and shared, latent, recurrent
    "kv=native,kv4,paged,turboquant",
    f"drafter={','.join(name for name in axes_of.whole()['drafter'] if name not in SPARED)}",
]
NO_DONOR = (
    "drafter=assistant: needs kv to donor, but kv=paged can only batch and rewind and snapshot and speculate. "
    "Choose kv=kv4 or kv=kv8 or kv=native or kv=per_layer or kv=rotated or kv=turboquant."
)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return Heads(
        {
            family: {
                name: str(tiny.checkpoint(name, family, folder, head_size=64))
                for name in tiny.WRITERS
                if tiny.fits(name, family)
            }
            for family in axes_of.FAMILIES
        }
    )


def pairs(found):
    return {
        (a, getattr(cell, a), b, getattr(cell, b))
        for cell in found
        for a, b in combinations(SIDES, 2)
    }


@pytest.mark.parametrize("words", [[], COVERED], ids=["whole", "tried here"])
def test_a_cover_has_every_pair_that_the_whole_has(heads, words):
    axes = Axes.read(words)
    whole, cover = list(cells(axes, heads)), list(pairwise(axes, heads))
    assert len(cover) < len(whole) / 3
    halves = [replace(cell, rows=(rows,)) for cell in whole for rows in cell.rows]
    assert pairs(halves) == pairs(cover)


def test_every_cell_is_there_but_those_that_cannot_be(heads):
    whole = list(cells(Axes.read(), heads))
    there = {(cell.drafter, cell.kv, cell.family) for cell in whole}
    assert len(there) == len(whole)
    absent = set(product(*map(axes_of.whole().get, ("drafter", "kv", "family")))) - there
    assert {drafter for drafter, *_ in absent} == set(tiny.OF_ITS_FAMILY)


@pytest.mark.parametrize("family", Axes.read(COVERED).family)
def test_a_cover_keeps_every_promise(family, heads, tmp_path):
    wanted = [cell for cell in pairwise(Axes.read(COVERED), heads) if cell.family == family]
    found = list(Worker(tmp_path, heads, run.COVERED).run(wanted))
    assert [one for one in found if one.outcome == "fails"] == []
    assert {one.note for one in found if one.outcome == "refused"} <= {NO_DONOR}
    assert len(found) == len(wanted) > 5


def _wrong_token(results):
    results[1]["token_ids"][3] += 1


def _not_reused(results):
    results[1]["cached_tokens"] = 0


def _begun_again(results):
    results[1]["resumed_tokens"] = 0


@pytest.mark.parametrize(
    ("way", "change", "note"),
    [
        ("warm", _wrong_token, "warm: request 1 differs from plain at token 3"),
        ("warm from disk", _not_reused, "warm from disk: of request 1 nothing was reused"),
        ("resumed", _begun_again, "resumed: answer 1 began again"),
    ],
)
def test_what_one_request_misses_fails_the_cell(heads, tmp_path, monkeypatch, way, change, note):
    compare = Trial._compare

    def told(self, name, results, verdict):
        if name == way:
            change(results)
        compare(self, name, results, verdict)

    monkeypatch.setattr(Trial, "_compare", told)
    (found,) = Worker(tmp_path, heads).run(
        [Cell("suffix", "native", "llama", "[ram,disk]", rows=(1,))]
    )
    assert (found.outcome, found.note) == ("fails", note)


def test_a_cell_that_throws_has_one_outcome_a_number_of_rows(heads, tmp_path, monkeypatch):
    run_rows = Trial.run

    def thrown(self, rows):
        if rows == 4:
            raise TimeoutError("no event came")
        return run_rows(self, rows)

    monkeypatch.setattr(Trial, "run", thrown)
    one, four = Worker(tmp_path, heads, run.COVERED).run([Cell("suffix", "native", "llama")])
    assert (one.rows, one.outcome) == (1, "works")
    assert (four.rows, four.outcome, four.note) == (4, "fails", "no event came")


@pytest.mark.parametrize(("whose", "part"), [(Trial, "run"), (Worker, "_answers")])
def test_an_engine_that_breaks_is_a_failing_cell(whose, part, heads, tmp_path, monkeypatch):
    work = getattr(whose, part)

    def dying(**_):
        raise ArithmeticError("broken")

    def broken(self, *arguments):
        engine = self.engine if whose is Trial else arguments[0]
        monkeypatch.setattr(engine._turns, "turn", dying)
        return work(self, *arguments)

    monkeypatch.setattr(whose, part, broken)
    found = list(Worker(tmp_path, heads, run.COVERED).run([Cell("none", "native", "llama")]))
    assert [(one.rows, one.outcome) for one in found] == [(1, "fails"), (4, "fails")]
    assert all(one.note.startswith("the engine ") for one in found)


def test_rows_that_never_meet_are_a_failing_cell(heads, tmp_path, monkeypatch):
    monkeypatch.setattr(Trial, "_together", lambda self, asked: alone(self.engine, asked))
    (found,) = Worker(tmp_path, heads, run.COVERED).run(
        [Cell("none", "native", "llama", rows=(4,))]
    )
    assert found.outcome == "fails"
    ways = ("cold", "warm from disk", "resumed")
    assert found.note == "; ".join(f"{way}: no round had 4 rows" for way in ways)


def test_a_drafter_that_never_drafts_is_a_failing_cell(heads, tmp_path, monkeypatch):
    monkeypatch.setattr(NGramRow, "propose", lambda self, pending, depth: [])
    (found,) = Worker(tmp_path, heads, run.COVERED).run(
        [Cell("ngram", "native", "llama", rows=(1,))]
    )
    assert (found.outcome, found.note) == ("fails", "the drafter proposed nothing")


def test_what_a_cell_cannot_be_is_said(heads, tmp_path):
    (found,) = Worker(tmp_path, heads).run([Cell("mtp", "native", "llama", rows=(1,))])
    assert found.outcome == "refused"
    assert "holds no safetensors under 'mtp.'" in found.note
    with pytest.raises(AxisError, match=r"drafter: has no 'ngrm'\. Did you mean 'ngram'\?"):
        Axes.read(["drafter=ngrm"])
    with pytest.raises(AxisError, match=r"(?s)family: has no 'x'.*famly: no such axis|famly.*'x'"):
        Axes.read(["famly=llama", "family=x"])


def test_what_cannot_be_written_is_said_before_anything_is_tried(tmp_path, capsys):
    assert main(["matrix", "-o", str(tmp_path)]) == 2
    assert (
        f"{tmp_path} is a folder. Name a file in it, as {tmp_path}/NAME" in capsys.readouterr().err
    )
    for length in (255, 256):  # what is written beside it first has a longer name
        place = tmp_path / ("m" * length)
        assert main(["matrix", "-o", str(place)]) == 2
        assert f"{place} cannot be written: File name too long" in capsys.readouterr().err
    assert main(["matrix", "--workers", "0"]) == 2
    assert "--workers: wants a whole number, 1 or more, got '0'" in capsys.readouterr().err


def test_a_matrix_that_is_told_to_end_does_not_wait_and_leaves_what_was_written(tmp_path):
    (tmp_path / "m.md").write_text("before")
    words = ["matrix", "--axes", "kv=native,kv8", "family=llama", "-o", str(tmp_path / "m.md")]
    command = [sys.executable, "-W", "ignore", "-m", "pipeline", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr.read(1) == b"."
        process.send_signal(signal.SIGHUP)
        assert process.stderr.read() in (b"", b"."), "told to end, it tries on"
        assert process.wait() == 128 + signal.SIGHUP
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("m.md", "before")]


def test_the_page():
    cell = Cell("suffix", "kv8", "llama")
    outcomes = [
        Outcome(replace(cell, drafter="none"), 1, "works"),
        Outcome(cell, 1, "works", tokens=9, drafted=5),
        Outcome(cell, 4, "refused", "too wide."),
    ]
    text = page(outcomes, "headrace matrix", "here")
    assert "| suffix  | no (1) |" in text
    assert "\n1. too wide.\n" in text
    assert "3 cells: 2 work, 0 fail, 1 are refused (33.3%). 9 tokens were compared." in text
    assert "Of 1 cell tried with a drafter 1 drafted, 5 tokens in all." in text


def test_a_cell_that_hangs_is_not_waited_for(monkeypatch, tmp_path):
    worker = (
        "import json, sys, time\n"
        "if json.load(sys.stdin)['cells'][0]['family'] == 'gemma4': time.sleep(600)"
    )
    monkeypatch.setattr(run, "WORKER", ("-c", worker))
    monkeypatch.setattr(run, "write_heads", lambda folder: Heads({"llama": {}, "gemma4": {}}))
    axes, began = Axes.read(["family=llama,gemma4", "drafter=suffix"]), time.monotonic()
    with pytest.raises(run.MatrixError, match="a worker ended after 0 of"):
        run.run(axes, cover=False, workers=2, report=lambda one: None)
    assert time.monotonic() - began < 60
