"""Adapters that come and go while requests run and wait."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from adapter_folders import opened, written
from support import Halted, Running, prompt_ids
from toy_served import Served

from pipeline.cli import main
from pipeline.cli.served import Apart, Locked, Recipe
from pipeline.errors import ClosedError, RequestError
from pipeline.isolate.engine import IsolatedEngine
from pipeline.isolate.mounts import FarMounts
from pipeline.types import Batch, Request, Sequence
from pipeline.warming import read_prompts, warm

PROMPT = prompt_ids(40)
WANTED = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return written(tmp_path_factory.mktemp("adapters"), "llama")


def answer(engine, adapter, **more):
    return engine.generate(PROMPT, **WANTED, **more, adapter=adapter)


class Held(Halted):
    """The only row that there may be; what is asked meanwhile waits."""

    def then(self, work):
        """`work` (a command) is in the queue before the row may end; its result."""
        found = []
        thread = threading.Thread(target=lambda: found.append(_tried(work)))
        thread.start()
        while not self.engine.ownership.holds_admission:
            thread.join(0.001)
        self.go()
        thread.join(20)
        self.result()
        return found[0]


def _tried(work):
    try:
        return work()
    except RequestError as error:
        return error


@pytest.fixture
def busy(folders):
    mounted = {name: folders[name] for name in ("a", "wide")}
    options = ("flow=plain", "drafter=none", "tier=ram", "limits.max_rows=1", "adapters.default=a")
    with opened("llama", mounted, *options) as engine:
        answer(engine, "a")  # a state that an exchange makes stale
        yield engine


def test_a_request_that_waits_gets_what_is_mounted_when_it_starts(busy, folders):
    old = answer(busy, "a")["token_ids"]
    held = Held(busy, PROMPT)
    waiting = Running(busy, PROMPT, **WANTED, adapter="a")
    default = Running(busy, PROMPT, **WANTED)
    held.then(lambda: busy.adapters.mount("a", folders["b"]))
    first, second = waiting.result(), default.result()
    cached = sorted(each["cached_tokens"] for each in (first, second))
    assert cached == [0, len(PROMPT) - 1], "the state of the old weights serves neither"
    busy.adapters.mount("b", folders["b"])
    assert first["token_ids"] == second["token_ids"] == answer(busy, "b")["token_ids"]
    assert first["token_ids"] != old


def test_what_is_unmounted_while_it_waits_is_named(busy):
    held = Held(busy, PROMPT)
    waiting = Running(busy, PROMPT, **WANTED, adapter="wide")
    assert held.then(lambda: busy.adapters.unmount("wide")) is None
    with pytest.raises(RequestError, match="'wide' is not mounted"):
        waiting.result()
    assert len(answer(busy, "a")["token_ids"]) == 20
    with pytest.raises(RequestError, match="is the default") as refused:
        busy.adapters.unmount("a")
    assert refused.value.status == 400
    with pytest.raises(RequestError, match="no such id") as unknown:
        busy.adapters.unmount("wide")
    assert unknown.value.status == 404


def test_a_row_that_comes_back_goes_on_with_what_it_wore_or_fails_by_name(busy):
    """A parked row, say: its state is of the old weights."""
    stage = busy.pipeline.stages["adapt"]
    row = Sequence(Request("r", adapter=("wide",)), print, namespace="base")
    batch = Batch([row], None, None)
    stage.run(batch)
    worn, namespace = row.adapters, row.namespace
    assert worn and namespace != "base"
    stage.run(batch)
    assert (row.adapters, row.namespace, row.error) == (worn, namespace, None)
    busy.adapters.unmount("wide")
    stage.run(batch)
    assert "has been unmounted" in str(row.error)


def test_another_process_has_what_was_mounted_in_the_first(folders, monkeypatch):
    """`server.isolate`: the engine is killed; what the operator had changed is so in the next."""
    home = str(Path(folders["a"]).parent)
    told = f"adapters.folders={{a: {folders['a']}, b: {folders['b']}}}"
    more = ("adapters=lora", f"adapters.shelf={home}")
    recipe = Served.of(told, *more, recipe="tiny")
    engine = IsolatedEngine(recipe)
    engine.open()
    try:
        assert engine.target_info["adapters"] == ["a", "b"]
        assert engine.adapters.mount_shelved("w", "wide", 0.5)["scale"] == 0.5
        engine.adapters.unmount("b")
        with pytest.raises(RequestError, match="no such folder"):
            engine.adapters.mount_shelved("x", "../b", 1.0)
        with monkeypatch.context() as hasty:
            hasty.setattr("pipeline.isolate.mounts.MOUNT_S", 0.0)
            with pytest.raises(ClosedError, match="has not answered within 0 s"):
                engine.adapters.mount_shelved("late", "twin", 1.0)
        until = time.monotonic() + 60
        while "late" not in engine.target_info["adapters"]:  # nobody waits for it, but it is so
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(engine.health()["isolate"]["pid"], signal.SIGKILL)
        until = time.monotonic() + 60
        while engine.health()["isolate"]["restarts"] < 1 or engine.health()["state"] != "open":
            assert time.monotonic() < until
            time.sleep(0.02)
        assert engine.target_info["adapters"] == ["a", "w", "late"]
        assert [one["id"] for one in engine.adapters.listed()] == ["a", "w", "late"]
    finally:
        engine.close()


def test_what_is_mounted_from_the_shelf_of_a_locked_server_outlives_a_crash(
    folders, tmp_path, monkeypatch
):
    """It was not there when the lock was made. What may differ may be as it was locked by then."""
    shelf, lock = tmp_path / "shelf", tmp_path / "a.lock.yaml"
    shelf.mkdir()
    locked = ("adapters=lora", f"adapters.shelf={shelf}", "server.isolate=true")
    assert main(["lock", "tiny", *locked, "-o", str(lock)]) == 0
    monkeypatch.setenv("MLX_OF_NO_MEANING", "1")
    allowed = ["artifacts.adapters", "platform.environment.MLX_OF_NO_MEANING"]
    apart = Apart(Locked.of(str(lock), (), (), allowed))
    engine = IsolatedEngine(apart, apart.again)
    engine.open()
    try:
        shutil.copytree(folders["a"], shelf / "new")
        engine.adapters.mount_shelved("new", "new", 1.0)
        monkeypatch.delenv("MLX_OF_NO_MEANING")
        os.kill(engine.health()["isolate"]["pid"], signal.SIGKILL)
        until = time.monotonic() + 60
        while engine.health()["isolate"]["restarts"] < 1 or engine.health()["state"] != "open":
            assert time.monotonic() < until
            time.sleep(0.02)
        assert [one["id"] for one in engine.adapters.listed()] == ["new"]
        assert engine.health()["isolate"]["restarts"] == 1
    finally:
        engine.close()


def test_what_was_changed_is_done_again_in_an_order_in_which_there_is_room(folders, caplog):
    """Of two that may be mounted, `b` goes, `w` comes and goes, `b` comes back, `a` goes, `w` comes."""
    told = f"adapters.folders={{a: {folders['a']}, b: {folders['b']}}}"
    shelf = f"adapters.shelf={Path(folders['a']).parent}"
    more = ("adapters=lora", told, shelf, "adapters.max_adapters=2")
    recipe = Recipe.of("tiny", ["debug=none", "server.port=0", *more], ())
    far = FarMounts(lambda call, within_s, done, **asked: done())
    far.unmount("b")
    far.mount_shelved("w", "wide", 1.0)
    far.unmount("w")
    far.mount_shelved("b", "b", 0.5)
    far.unmount("a")
    far.mount_shelved("w", "wide", 1.0)
    engine = far.served(recipe).open()
    try:
        assert {one["id"]: one["scale"] for one in engine.adapters.listed()} == {"b": 0.5, "w": 1.0}
    finally:
        engine.close()
    assert "is not as it was" not in caplog.text


def test_prompts_are_warmed_for_an_adapter(busy):
    ids = busy.tokenizer.encode("The mill stands by the river")
    lines = '{"prompt": "The mill stands by the river", "adapter": "wide"}\n{"prompt": "x", "adapter": "who"}'
    report = warm(busy, read_prompts(lines, "file"), [1, 2])
    assert "'who' is not mounted" in report.refused[2]
    found = [busy.generate(ids, max_tokens=1, adapter=name) for name in ("wide", "a")]
    assert [one["cached_tokens"] for one in found] == [len(ids) - 1, 0]
