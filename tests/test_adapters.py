"""What a folder of adapters does to a model: the numbers of who wrote it, or a refusal that says why."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import mlx.core as mx
import pytest
from adapter_folders import linears, pairs, write_mlx, write_peft
from targets import TOKENS, Cpu, scores

from pipeline.errors import OpenError, RequestError
from pipeline.types import Request
from stages.adapters.lora import Lora
from stages.adapters.none import NoAdapters
from stages.adapters.peft import ByModule
from stages.models.tiny import Tiny

NAMES = ("q_proj", "o_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def target(home):
    made = Tiny(Cpu(), family="llama", cache_dir=str(home))
    made.open()
    yield made
    made.close()


@pytest.fixture(scope="module")
def made(target):
    return pairs(linears(target, NAMES), seed=1)


def adapters(target, folders=None, *, default=(), scales=None, **settings):
    part = Lora(
        target, Cpu(), folders=folders or {}, scales=scales or {}, default=list(default), **settings
    )
    part.open()
    return part


def worn(part, target, *names):
    """Scores of one row that wears these."""
    with part.worn([part.resolve(Request("r", adapter=names))]):
        found = scores(target)
    mx.eval(found)
    return found


def by_mlx_lm(target, folder):
    """The same row by mlx-lm's own code."""
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    model, _ = load_model(target.locate())
    return load_adapters(model, folder)(TOKENS)


def close(one, other):
    return float(mx.abs(one - other).max()) < 1e-4 * float(mx.abs(other).max())


# --- what it adds


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_scores_are_those_of_mlx_lm(kind, target, made, tmp_path):
    modules = target.modules()
    lengths = {p: modules[p].weight.square().sum(1).sqrt() * 1.2 for p in made}
    folder = write_mlx(tmp_path / "a", made, lengths=lengths if kind == "dora" else None)
    part = adapters(target, {"a": folder})
    found, own = worn(part, target, "a"), scores(target)
    part.close()
    assert close(found, by_mlx_lm(target, folder))
    assert not close(found, own)
    assert mx.array_equal(scores(target), own)


def test_lengths_of_dora_leave_a_layers_bias_alone(home, tmp_path):
    target = Tiny(Cpu(), family="gpt_oss", cache_dir=str(home))
    target.open()
    shapes = linears(target, ("q_proj",))
    modules = target.modules()
    for path in shapes:
        modules[path].bias = mx.random.normal(modules[path].bias.shape, key=mx.random.key(4))
    lengths = {p: modules[p].weight.square().sum(1).sqrt() * 2 for p in shapes}
    nothing = {path: (a, b * 0) for path, (a, b) in pairs(shapes).items()}
    part = adapters(target, {"a": write_mlx(tmp_path / "a", nothing, lengths=lengths)})
    found = worn(part, target, "a")
    part.close()
    for path in shapes:
        modules[path].weight = modules[path].weight * 2
    assert close(found, scores(target))
    target.close()


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1.0}}])
def test_peft_folders_mean_what_they_mean_to_peft(config, target, made, tmp_path):
    """rank 4, alpha 8: scale 2; rsLoRA: 8 / sqrt(4)."""
    ours = {
        path: (a, b * (0.125 if "q_proj" in path and "alpha_pattern" in config else 1.0))
        for path, (a, b) in made.items()
    }
    scale = 4.0 if "use_rslora" in config else 2.0
    folders = {
        "mlx": write_mlx(tmp_path / "mlx", ours, scale=scale),
        "peft": write_peft(tmp_path / "peft", made, **config),
    }
    part = adapters(target, folders)
    assert close(worn(part, target, "peft"), worn(part, target, "mlx"))
    assert part.stats()[1]["layout"] == "peft"
    part.close()


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["q_proj", "v_proj"], 0),
        (["v_proj", r"self_attn\.q_proj"], 1),
        (["proj", "_proj", "layers.0", "x.q_proj"], None),
        (["layers.1.self_attn.q_proj", "layers.0.self_attn.q_proj", "q_proj"], 1),
        (["^layers.0.self_attn.q_proj", "^model.layers.0.self_attn.q_proj$"], 1),
    ],
)
def test_a_number_is_of_the_first_key_that_ends_the_name_as_in_peft(keys, wanted):
    path = "model.layers.0.self_attn.q_proj"
    by_peft = [key for key in keys if re.match(rf"(.*\.)?({key})$", path)]
    assert by_peft[:1] == ([] if wanted is None else [keys[wanted]])
    numbers = {key: at for at, key in enumerate(keys)}
    found = ByModule(
        {"lora_alpha": None, "alpha_pattern": numbers}, "lora_alpha", "alpha_pattern", 0
    )
    assert found[path] == wanted


def test_no_folder_takes_long_to_be_refused(target, tmp_path):
    """Names of any number and length: what they are like is looked for a few times only."""
    few = {
        f"model.layers.{at}.self_attn.q_porj": (mx.zeros((64, 4)), mx.zeros((4, 64)))
        for at in range(9)
    }
    many = {
        f"model.layers.{at}.self_attn.q_porj": pair
        for at, pair in enumerate([few["model.layers.0.self_attn.q_porj"]] * 5000)
    }
    began = time.monotonic()
    assert "it changes 5,000 modules; the model has" in refusal(
        target, write_mlx(tmp_path / "a", many)
    )
    long = {"." * 200_000 + "q_proj": next(iter(few.values()))}
    said = refusal(target, write_peft(tmp_path / "b", long, alpha_pattern={"." * 100_000: 1.0}))
    assert len(said) < 1000
    assert time.monotonic() - began < 5


def test_packed_weights_have_adapters_too(home, tmp_path):
    target = Tiny(Cpu(weights="as_is"), family="llama", cache_dir=str(home), bits=4)
    target.open()
    shapes = linears(target, NAMES)
    assert type(next(iter(target.modules()[path] for path in shapes))).__name__ == "QuantizedLinear"
    made, modules = pairs(shapes), target.modules()
    part = adapters(target, {"a": write_mlx(tmp_path / "a", made)})
    found = worn(part, target, "a")
    x = mx.random.normal((1, 3, next(iter(shapes.values()))[1]))
    path = next(iter(shapes))
    a, b = made[path]
    with part.worn([part.resolve(Request("r", adapter=("a",)))]):
        one = modules[path](x)
    part.close()
    assert close(one, modules[path](x) + 2.0 * (x @ a) @ b)
    assert not close(found, scores(target))
    target.close()


def test_a_sum_adds_what_each_adds_and_scales_multiply(target, made, tmp_path):
    half = {path: (a, b / 2) for path, (a, b) in made.items()}
    folders = {name: write_mlx(tmp_path / name, made) for name in ("a", "b")}
    folders["half"] = write_mlx(tmp_path / "half", half)
    part = adapters(target, folders, scales={"b": 0.5})
    told = {each["id"]: each["digest"] for each in part.stats()}
    assert told["b"] == told["half"] != told["a"], "a digest is of content, scale included"
    assert close(worn(part, target, "b", "half"), worn(part, target, "a"))
    part.close()


# --- what is refused


def refusal(target, folder, **settings):
    with pytest.raises(OpenError) as error:
        adapters(target, {"bad": str(folder)}, **settings)
    return str(error.value)


def test_every_mismatch_is_told_at_once_with_both_sides_numbers(target, made, tmp_path):
    (path, (a, b)), *rest = sorted(made.items())
    wrong = {
        path: (mx.zeros((99, 4)), b),
        "model.layers.40.self_attn.q_proj": (a, b),
        "model.layers.0.self_attn.q_prj": (a, b),
        "model.embed_tokens": (a, b),
        **dict(rest[:2]),
    }
    said = refusal(target, write_mlx(tmp_path / "a", wrong))
    assert f"{path}: made for 99 inputs and {b.shape[1]} outputs" in said
    assert f"the model's has {a.shape[0]} and {b.shape[1]}" in said
    assert "layers.40.self_attn.q_proj: the model has no such module" in said
    assert "Did you mean 'model.layers.0.self_attn.q_proj'?" in said
    assert "model.embed_tokens: only modules of the decoder's layers" in said
    assert said.count("\n") == 4


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"fine_tune_type": "full"}, "mlx_lm.fuse"),
        ({"lora_parameters": {"rank": 4, "alpha": 8}}, "lora_parameters.scale"),
        ({"lora_parameters": {"rank": 8, "scale": 2.0}}, "of rank 4; adapter_config.json says 8"),
    ],
)
def test_what_mlx_lms_folders_cannot_have(config, word, target, made, tmp_path):
    assert word in refusal(target, write_mlx(tmp_path / "a", made, **config))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"], "layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "Save it converted"),
        ({"r": 16}, "of rank 4; adapter_config.json says 16"),
        ({"lora_alpha": None}, "lora_alpha: wants a number"),
        ({"r": 0}, "r: wants a number, 1 to 1e+09, got 0"),
        ({"r": 10**400}, "r: wants a number"),
        (
            {"use_rslora": True, "rank_pattern": {"q_proj": -4}},
            "'q_proj' wants a number, 1 to 1e+09",
        ),
        ({"alpha_pattern": {"q_proj": "2"}}, "'q_proj' wants a number, -1e+09 to 1e+09, got '2'"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern: wants numbers by module"),
        ({"alpha_pattern": {"((([^.]*)*)*)*x": 2.0}}, "is no module's name or end of one"),
        ({"rank_pattern": {"((a{1000}){1000}){1000}": 4}}, "Write them out"),
        ({"alpha_pattern": {"(": 2.0}}, "Write them out"),
    ],
)
def test_what_pefts_folders_cannot_have(config, word, target, made, tmp_path):
    assert word in refusal(target, write_peft(tmp_path / "a", made, **config))


def test_folders_that_are_none(target, made, tmp_path):
    assert (
        refusal(target, tmp_path / "x") == f"adapters.folders.bad: there is no folder {tmp_path}/x."
    )
    assert "it lacks one of adapter_config.json" in refusal(target, tmp_path)
    folder = Path(write_mlx(tmp_path / "a", made))
    (folder / "adapter_config.json").write_text("[]")
    assert "cannot be read" in refusal(target, folder)
    (folder / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 1}}))
    (folder / "adapters.safetensors").write_bytes(b"\x00" * 64)
    assert "cannot be read" in refusal(target, folder)


def test_number_and_bytes_are_bounded(target, made, tmp_path):
    folder = write_mlx(tmp_path / "a", made)
    assert "adapters.max_gb allows 1,000 bytes" in refusal(target, folder, max_gb=1e-6)
    part = adapters(target, {"a": folder}, max_adapters=1)
    with pytest.raises(RequestError, match=r"adapters\.max_adapters=1"):
        part.mount("b", folder, 1.0)
    assert [each["id"] for each in part.stats()] == ["a"]
    assert part.nbytes == part.stats()[0]["bytes"] > 0
    part.close()
    assert part.nbytes == 0


def test_a_module_whose_rows_are_not_apart_is_refused(home, tmp_path):
    """Rows must be the first axis of what it is given."""
    target = Tiny(Cpu(), family="llama", cache_dir=str(home))
    target.open()
    path, module = next((p, m) for p, m in target.modules().items() if p.endswith("q_proj"))
    own = type(module)

    class Flat(own):
        def __call__(self, x):
            flat = x.reshape(-1, x.shape[-1])
            return super().__call__(flat).reshape(*x.shape[:2], -1)

    shapes = {path: linears(target, NAMES)[path]}
    good = adapters(target, {"a": write_mlx(tmp_path / "a", pairs(shapes))})
    good.close()
    object.__setattr__(module, "__class__", type("Linear", (Flat, type(module)), {}))
    said = refusal(target, write_mlx(tmp_path / "a", pairs(shapes)))
    assert f"{path} is given (6, 64) for 3 rows" in said
    other = {at: shape for at, shape in linears(target, NAMES).items() if at != path}
    part = adapters(target, {"a": write_mlx(tmp_path / "b", pairs(other))})
    worn(part, target, "a")  # what was refused is in nobody's way
    part.close()
    target.close()


# --- ids and paths


def test_requests_name_ids_and_never_folders(target, made, tmp_path):
    folder = write_mlx(tmp_path / "shelf" / "sql", made)
    part = adapters(target, {"sql": folder}, shelf=str(tmp_path / "shelf"))
    for name in ("sqk", folder, "../sql", "/", "sql/.", ""):
        with pytest.raises(RequestError, match="is not mounted") as refused:
            part.check(Request("r", adapter=(name,)))
        assert refused.value.param == "adapter"
    with pytest.raises(RequestError, match="Did you mean 'sql'"):
        part.check(Request("r", adapter=("sqk",)))
    assert part.shelf_folder("sql") == folder
    for name in ("..", ".", "/", folder, "../shelf/sql", "sql/", "sql/../sql", "nothing", ""):
        with pytest.raises(RequestError, match="no such folder on the shelf"):
            part.shelf_folder(name)
    for scale in (float("nan"), float("inf"), -1e9):
        with pytest.raises(RequestError, match="scale wants"):
            part.mount("a", folder, scale)
    for name in ("none", "../x", "a+b", "", "a" * 65):
        with pytest.raises(RequestError, match="this id"):
            part.mount(name, folder, 1.0)
    part.close()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"folders": {"a/b": "x"}}, "folders: 'a/b' wants letters"),
        ({"folders": {"none": "x"}}, "folders: 'none' asks for no adapter"),
        ({"folders": {"sql": "x"}, "default": "sqk"}, "default: 'sqk' is not among folders"),
        ({"scales": {"sql": 1.0}}, "scales: 'sql' is not among folders"),
        (
            {"folders": {"sql": "x"}, "scales": {"sql": 1e9}},
            "scales: sql wants -10,000.0 to 10,000.0",
        ),
        ({"max_adapters": 0}, "max_adapters: wants >= 1"),
    ],
)
def test_settings_that_cannot_be(settings, word):
    with pytest.raises(ValueError, match=word):
        Lora(None, Cpu(), **{"folders": {}, "scales": {}, "default": [], **settings})  # type: ignore[arg-type]


def test_a_mount_that_fails_changes_nothing(target, made, tmp_path):
    good = write_mlx(tmp_path / "good", made)
    bad = write_mlx(tmp_path / "bad", {"model.layers.9.x": next(iter(made.values()))})
    part = adapters(target, {"a": good})
    before, told = worn(part, target, "a"), part.stats()
    with pytest.raises(RequestError, match="no such module"):
        part.mount("a", bad, 1.0)
    assert part.stats() == told
    assert mx.array_equal(worn(part, target, "a"), before)
    part.close()


@pytest.mark.parametrize("fault", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_mount_that_breaks_off_leaves_the_model_as_it_was(
    fault, target, made, tmp_path, monkeypatch
):
    folder = write_mlx(tmp_path / "a", made)
    part, before = adapters(target), scores(target)

    def broken(tokens, caches):
        raise fault

    with monkeypatch.context() as patched:
        patched.setattr(target, "hidden", broken)
        with pytest.raises(type(fault)):
            part.mount("a", folder, 1.0)
    sites = [type(module)._site for module in target.modules().values() if hasattr(module, "_site")]
    assert sites and not any(site.stacks for site in sites)
    assert part.stats() == [] and mx.array_equal(scores(target), before)
    part.mount("a", folder, 1.0)
    part.close()


def test_a_shelf_is_looked_for_at_the_start_and_whenever_it_is_asked(target, made, tmp_path):
    shelf = tmp_path / "shelf"
    with pytest.raises(OpenError) as refused:
        adapters(target, {"bad": str(tmp_path / "x")}, shelf=str(shelf))
    told = str(refused.value).splitlines()
    assert told[0].startswith(f"adapters.shelf: there is no folder {shelf}. Make it, name another")
    assert told[1].startswith("adapters.folders.bad: there is no folder")
    write_mlx(shelf / "a", made)
    part = adapters(target, shelf=str(shelf))
    shutil.rmtree(shelf)
    with pytest.raises(
        RequestError, match=r"adapters\.shelf cannot be read.*Make that folder"
    ) as error:
        part.shelf_folder("a")
    assert (error.value.param, error.value.status) == ("folder", 400)
    part.close()


@pytest.mark.parametrize(
    "part", [NoAdapters(), Lora(None, Cpu(), folders={}, scales={}, default=[])]
)  # type: ignore[arg-type]
def test_who_asks_where_nothing_is_mounted_is_told_what_to_type(part):
    with pytest.raises(RequestError, match=r"adapters\.folders=\{ID: FOLDER\}"):
        part.check(Request("r", adapter=("sql",)))


def test_locks_know_the_files(made, tmp_path):
    folder = write_mlx(tmp_path / "a", made)
    part = Lora(None, Cpu(), folders={"a": folder}, scales={}, default=[])  # type: ignore[arg-type]
    assert set(part.files()) == {"a/adapter_config.json", "a/adapters.safetensors"}
    part.folders |= {"b": "/nowhere/b", "c": "/nowhere/c"}
    with pytest.raises(OpenError, match=r"(?s)folders\.b: there is no.*folders\.c: there is no"):
        part.files()
