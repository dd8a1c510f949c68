"""Every option of the group `model`, and every family of `tiny`, keeps the Target contract."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import pytest
import yaml
from gguf_files import to_gguf
from targets import Cpu, caches, greedy

from pipeline.errors import OpenError
from stages.models.fake import Fake
from stages.models.loading.families import FAMILIES
from stages.models.none import NoModel
from stages.models.tiny import Tiny

CONF = Path(__file__).parents[2] / "conf" / "model"
REAL = {"smollm2", "gemma3_270m"}  # options with a package of weights behind them
VARIANTS = {f"tiny-{family}": ("tiny", {"family": family}) for family in FAMILIES}
VARIANTS |= {"fake-layers": ("fake", {"layers": 2})}
OPTIONS = {path.stem: (path.stem, {}) for path in CONF.glob("*.yaml") if path.stem != "none"}


def settings_of(option, folder):
    """An option's class and its settings on disk, with what only a test can know filled in."""
    settings = yaml.safe_load((CONF / f"{option}.yaml").read_text())
    module, name = settings.pop("_target_").rsplit(".", 1)
    if "cache_dir" in settings and option not in REAL:
        settings["cache_dir"] = folder
    if settings.get("path") == "???":
        source = Tiny(Cpu(), cache_dir=folder).locate()
        settings["path"] = str(source)
        if option == "gguf":
            settings["path"] = str(to_gguf(source, Path(folder) / "tiny.gguf", "llama"))
    return getattr(import_module(module), name), settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def marked(name):
    return pytest.param(name, marks=pytest.mark.real if name in REAL else ())


@pytest.fixture(scope="module", params=map(marked, sorted(OPTIONS | VARIANTS)))
def make(request, folder):
    """Makes the option's part, unopened."""
    option, extra = (OPTIONS | VARIANTS)[request.param]
    maker, settings = settings_of(option, folder)
    return partial(maker, Cpu(), **settings | extra)


@pytest.fixture(scope="module")
def target(make):
    part = make()
    part.open()
    yield part
    part.close()
    part.close()


def test_attributes(target):
    assert target.name and len(target.artifact) == 32
    assert target.vocab_size > 200 and target.context_len > 1000
    assert target.eos_ids and max(target.eos_ids) < target.vocab_size
    assert target.dtype == "float32"
    assert target.prefill_chunk(1000) is None
    for spec in target.specs:
        assert spec.signature.startswith(spec.kind + ":") and spec.signature.endswith(":float32")
        assert (spec.window > 0) == (spec.kind in ("sliding", "chunked"))


def test_shapes(target):
    scores = target.head(target.hidden(mx.array([[5, 6, 7], [8, 9, 5]]), caches(target)))
    assert scores.shape == (2, 3, target.vocab_size) and scores.dtype == mx.float32
    assert target.calls == 0  # counted by whoever launches a forward


def test_one_by_one_equals_at_once(target):
    ids = target.tokenizer.encode("the cat sat on the mat, and then it ran")[:12]
    whole = target.head(target.hidden(mx.array([ids]), caches(target)))
    state, steps = caches(target), []
    for token in ids:
        steps.append(target.head(target.hidden(mx.array([[token]]), state)))
    assert mx.allclose(whole, mx.concatenate(steps, axis=1), atol=2e-4)


def test_greedy_text_is_not_degenerate(target):
    one, two = greedy(target, "Hello there", 48), greedy(target, "Hello where?", 48)
    assert one != two
    if target.name not in REAL:  # a real model may well say one thing again and again, then EOS
        assert len(set(one)) > 12 and not target.eos_ids & {*one, *two}


def test_a_second_opening_is_the_same_model(make, target):
    again = make()
    again.open()
    assert again.artifact == target.artifact
    assert again.tokenizer.identity == target.tokenizer.identity
    assert greedy(again, "Hello there", 8) == greedy(target, "Hello there", 8)


def test_no_model_is_a_part_that_must_not_be_asked():
    nothing = NoModel()
    nothing.open()
    assert (nothing.name, nothing.vocab_size, nothing.specs) == ("none", 0, ())
    with pytest.raises(AssertionError, match="model=none was asked"):
        nothing.hidden(mx.array([[1]]), [])
    nothing.close()


def test_context_setting(folder):
    small = Tiny(Cpu(), context=64, cache_dir=folder)
    small.open()
    assert small.context_len == 64
    with pytest.raises(OpenError, match=r"context=100000 is not within 1\.\.4096"):
        Tiny(Cpu(), context=100000, cache_dir=folder).open()


def test_fake_sees_lost_moved_and_foreign_tokens():
    fake = Fake(Cpu(), layers=1)
    fake.open()

    def last(ids):
        hidden = fake.hidden(mx.array([ids]), caches(fake))
        return int(hidden[0, -1, 0].item())

    right = last([10, 20, 30, 40])
    assert right != last([10, 30, 40]) and right != last([20, 10, 30, 40])
    assert right != last([11, 20, 30, 40]) and right != last([10, 20, 20, 30, 40])


def test_fake_eos_and_delay():
    fake = Fake(Cpu(), eos_every=2)
    fake.open()
    assert greedy(fake, "a b", 30).count(257) > 0
    with pytest.raises(ValueError, match="vocab_size: wants >= 258, got 10"):
        Fake(Cpu(), vocab_size=10)


def test_fake_with_a_large_vocabulary():
    fake = Fake(Cpu(), vocab_size=1000)
    fake.open()
    assert fake.head(fake.hidden(mx.array([[999, 3]]), [])).shape == (1, 2, 1000)
    assert max(greedy(fake, "abc", 20)) < 256


def test_tiny_settings(folder):
    part = Tiny(Cpu(), family="gemma3", layers=3, window=7, cache_dir=folder)
    part.open()
    assert [(spec.kind, spec.window) for spec in part.specs] == [("sliding", 7)] * 2 + [("full", 0)]
    other = Tiny(Cpu(), family="gemma3", layers=3, window=7, seed=1, cache_dir=folder)
    other.open()
    assert other.artifact != part.artifact


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "lama"}, "family: no family named 'lama'. Did you mean 'llama'?"),
        ({"family": "llama", "window": 5}, "window: family llama has no sliding window."),
        ({"family": "gemma3", "layers": 2}, "layers: wants >= 3, got 2"),
    ],
)
def test_tiny_refuses(settings, message, folder):
    with pytest.raises(ValueError, match=message.replace("?", "[?]")):
        Tiny(Cpu(), **settings, cache_dir=folder)
