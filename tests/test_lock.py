"""Locks: what was tested is served again or refused by name, and every probe gives its tokens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.catalog import dump_yaml, load_yaml
from pipeline.cli import main
from pipeline.compose import compose
from pipeline.lab.lock import file
from pipeline.lab.lock.drift import differences
from pipeline.lab.lock.file import sealed
from pipeline.secrets import HIDDEN, storable, typed
from pipeline.server.keys import make_key
from stages import blas
from stages.models.tiny import Tiny

ROOT = Path(__file__).parents[1]
SECTIONS = [name for name in file.NAMES if name not in ("lock", "seals", "digest")]


def process(*words, folder=ROOT, **environment):
    """One command in a process of its own: exit code, standard output, standard error."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-W", "ignore", "-m", "pipeline", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def cli(capsys):
    def run(*words):
        code = main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model folder and a lock of it, made by a process of its own."""
    from targets import Cpu

    place = tmp_path_factory.mktemp("lock")
    shutil.copytree(Tiny(Cpu(), cache_dir=str(place / "cache")).locate(), place / "model")
    code, out, err = process(
        "lock", "local", f"model.path={place / 'model'}", "constraint=llguidance", "depth.max=4",
        "-o", str(place / "a.lock.yaml"),
    )  # fmt: skip
    assert code == 0, err
    assert "5 files, " in out and " 4 probes of " in out
    return place


@pytest.fixture
def lock(home):
    return home / "a.lock.yaml"


def altered(lock, place, **sections):
    """The lock with other sections, sealed as if it had been made so."""
    found = load_yaml(lock)
    made = sealed(**{name: found[name] for name in SECTIONS} | sections)
    path = place / "altered.lock.yaml"
    path.write_text(dump_yaml(asdict(made)))
    return path


def test_another_process_gives_every_token(lock, tmp_path):
    code, out, err = process("replay", str(lock), folder=tmp_path)
    assert code == 0, out + err
    assert out.count("all equal") == 4
    assert out.splitlines()[-1] == "every token is the locked one"


@pytest.mark.real
def test_a_real_model_is_locked_and_replayed_by_another_process(tmp_path):
    disk = f"tier.disk.path={tmp_path / 'states'}"
    place = str(tmp_path / "desk.lock.yaml")
    code, out, err = process("lock", "single_user", disk, "-o", place)
    assert code == 0, err
    code, out, err = process("replay", place)
    assert code == 0, out + err
    assert out.count("all equal") == 4
    files = load_yaml(Path(place))["artifacts"]["model"]
    assert [name.endswith(".gguf") for name in files] == [True]


def test_it_serves_what_is_still_the_same(cli, lock, monkeypatch):
    served = []

    def run_server(engine, settings, announce, tracing):
        served.append((engine.generate("x", max_tokens=3, seed=1)["token_ids"], settings.port))
        engine.close()
        return 0

    monkeypatch.setattr("pipeline.server.run.run_server", run_server)
    code, _, err = cli("serve", lock)
    assert code == 0, err
    code, out, err = cli(
        "serve", lock, "server.port=9", "--allow-drift", "config.server,artifacts.adapters"
    )
    assert code == 0, err
    assert "allowed: config.server.port: 8080 was locked, 9 is here" in out
    assert [port for _, port in served] == [8080, 9]
    assert served[0][0] == served[1][0]


def test_one_byte_of_the_weights(cli, lock, home, tmp_path):
    shutil.copytree(home / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    moved = (
        "serve",
        lock,
        f"model.path={tmp_path / 'model'}",
        "--allow-drift",
        "config.model.path",
    )
    code, _, err = cli(*moved)
    assert code == 2
    assert "does not describe what is here, 1 difference:" in err
    assert "- artifacts.model.model.safetensors: " in err and "Bring it back as it was" in err


@pytest.mark.parametrize(
    ("name", "chosen", "setting"),
    [
        ("model.weights", "model=local model.path=x", "model.path"),
        ("model.weights", "model=tiny", "model.folder"),
        ("draft_model.weights", "draft_model=tiny", "draft_model.folder"),
        ("model.weights", "model=smollm2", ""),
        ("drafter.weights", "drafter=eagle3 drafter.path=x", "drafter.path"),
        ("adapters.a/weights", "adapters=lora", "adapters.folders"),
        ("adapters.shelf/a/weights", "adapters=lora", "adapters.shelf"),
        ("kv.map.json", "kv=per_layer", "kv.map"),
    ],
)
def test_where_a_file_is_now_is_said_by_a_setting_that_there_is(name, chosen, setting):
    group, _, file = name.partition(".")
    there = [{"artifacts": {group: {file: text}}} for text in ("this", "that")]
    config = compose("fake", chosen.split()).config
    (told,) = map(str, differences({**there[0], "config": config}, there[1]))
    if setting:
        assert f"say where it is now: {setting}=… --allow-drift config.{setting})" in told
    else:
        assert "Bring it back as it was, or lock the recipe again." in told


def test_a_file_that_is_missing_and_one_that_is_new(cli, lock, home, tmp_path):
    shutil.copytree(home / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    code, _, err = cli("serve", lock, f"model.path={tmp_path / 'model'}", "--allow-drift", "config")
    assert code == 2
    assert "- artifacts.model.generation_config.json: 24 bytes" in err
    assert "nothing is here" in err
    assert "- artifacts.model.chat_template.jinja: nothing was locked, 14 bytes" in err
    code, _, err = cli("serve", lock, "model.path=/nowhere/m", "--allow-drift", "config")
    assert code == 2
    assert "- artifacts.model: config.json, " in err and "No such folder: /nowhere/m" in err


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"no weights")])
def test_replay_prints_what_differs_though_nothing_can_be_loaded(cli, lock, home, tmp_path, spoil):
    shutil.copytree(home / "model", tmp_path / "model")
    spoil(tmp_path / "model" / "model.safetensors")
    place = f"model.path={tmp_path / 'model'}"
    code, out, err = cli("replay", lock, place, "--allow-drift", "config")
    assert code == 2 and f"cannot load {tmp_path / 'model'}: " in err
    assert "allowed: config.model.path: " in out
    assert "differs: artifacts.model" in out and "all equal" not in out


def test_one_package_version(cli, lock, tmp_path, monkeypatch):
    folder = tmp_path / "numpy-9.9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = cli("serve", lock)
    assert code == 2
    was = load_yaml(lock)["packages"]["numpy"]
    assert f"- packages.numpy: {was} was locked, 9.9.9 is here. pip install numpy=={was}" in err
    code, out, _ = cli("replay", lock, "--allow-drift", "packages")
    assert code == 0
    assert "allowed: packages.numpy" in out
    code, out, _ = cli("replay", lock, "--allow-drift", "packages.mlx,platform")
    assert code == 2
    assert "differs: packages.numpy" in out and "every token is the locked one" in out


def test_one_value_of_the_configuration(cli, lock):
    code, _, err = cli("serve", lock, "depth.max=5", "scheduler.step_tokens=9")
    assert code == 2
    assert "- config.depth.max: 4 was locked, 5 is here. Leave it as it was locked" in err
    assert "- config.scheduler.step_tokens: 256 was locked, 9 is here" in err
    code, _, err = cli("serve", lock, "kv=kv8", "depth.mx=2")
    assert code == 2
    assert "- kv: a lock's options are settled." in err
    assert "- depth.mx: depth=fixed takes no 'mx'. Did you mean 'depth.max'?" in err


def test_other_code_and_another_machine(cli, lock, tmp_path):
    found = load_yaml(lock)
    path = altered(
        lock, tmp_path,
        code={**found["code"], "stages": "0" * 32}, platform={**found["platform"], "cpu": "Z80"},
        model={**found["model"], "template": "other"},
    )  # fmt: skip
    code, _, err = cli("serve", path)
    assert code == 2
    assert "2 differences" in err and "- code.stages: " in err and "- platform.cpu: Z80" in err
    code, _, err = cli("serve", path, "--allow-drift", "platform,code")
    assert code == 2
    assert "- model.template: other was locked" in err
    code, _, err = cli("serve", path, "--allow-drift", "plattform")
    assert code == 2
    assert "nothing is called 'plattform'. Did you mean 'platform'?" in err
    for verb in ("serve", "replay"):
        said = "platform,config.servr,packages.nunpy,made"
        code, _, err = cli(verb, path, "--allow-drift", said)
        assert code == 2
        assert "nothing is called 'config.servr'. Did you mean 'config.server'?" in err
    code, _, err = cli("serve", path, "--allow-drift", "probes")
    assert "nothing is called 'probes'. It takes: choices, config, graph" in err


def test_the_first_token_that_differs_is_told_with_both_scores(cli, lock, tmp_path):
    probes = load_yaml(lock)["probes"]
    came = probes[0]["token_ids"][5]
    probes[0]["token_ids"][5] = 33
    probes[1]["token_ids"] = probes[1]["token_ids"][:-2]
    code, out, _ = cli("replay", altered(lock, tmp_path, probes=probes))
    assert code == 2
    line, other, *rest = out.splitlines()
    assert line.startswith("probe greedy: token 5 differs: 33 '!' was locked (-")
    assert f" here), {came} " in line and line.endswith(" here)")
    then, here = probes[0]["logprobs"][5], float(line.rsplit("(", 1)[1].split(" ")[0])
    assert abs(then - here) < 1e-3  # the same model: the token that came has the score it had
    assert "token 46 differs: the end was locked" in other
    assert rest[-1] == "probes that differ: 2"


def test_a_lock_cannot_name_other_code(cli, lock, tmp_path):
    config = load_yaml(lock)["config"]
    config["rule"] = {"_target_": "subprocess.Popen", "args": "true"}
    code, _, err = cli("serve", altered(lock, tmp_path, config=config))
    assert code == 2
    assert "rule._target_: target 'subprocess.Popen' is outside of stages.*" in err


def test_edited_and_cut_short(cli, lock, tmp_path):
    path, text = tmp_path / "b.lock.yaml", lock.read_text()
    path.write_text(
        text.replace("max: 4}", "max: 6}").replace("step_tokens: 256", "step_tokens: 1")
    )
    code, _, err = cli("replay", path)
    assert code == 2
    assert (
        f"- {path} config.depth.max: was edited after the lock was made: 4 -> 6. A lock is" in err
    )
    assert (
        f"- {path} config.scheduler.step_tokens: was edited after the lock was made: 256 -> 1."
        in err
    )
    assert "2 problems" in err
    path.write_text(text.replace("step_tokens: 256", "stp_tokens: 256").replace("cpu: ", "cpu: Z"))
    err = cli("replay", path)[2]
    assert (
        "config.scheduler.step_tokens: was edited after the lock was made: 256 -> nothing." in err
    )
    assert "config.scheduler.stp_tokens: was edited after the lock was made: nothing -> 256." in err
    assert "platform.cpu: was edited after the lock was made; it now says Z" in err
    path.write_text(text[: text.index("probes:")])
    assert "lacks probes, seals, digest: it was cut short. Copy it" in cli("serve", path)[2]
    path.write_text(text[:900])
    assert "Was it cut short? Copy it" in cli("serve", path)[2]
    path.write_text(text + "extra: 1\nprobs: 2\n")
    err = cli("serve", path)[2]
    assert "extra: a lock has no such section. A lock is not edited" in err
    assert "Did you mean 'probes'?" in err
    path.write_text(text.replace("seals: {", "seals: {spare.part: abc, other: abc, "))
    err = cli("serve", path)[2]
    assert "spare.part: was edited after the lock was made; it now says nothing." in err
    assert "other: was edited" in err
    path.write_text(text.replace("lock: 2\n", "lock: 7\n"))
    assert "has the layout 7; this version of headrace reads 2." in cli("diff", path, lock)[2]
    path.write_text("[]")
    assert "is no lock" in cli("replay", path)[2]
    assert "there is no such lock" in cli("replay", tmp_path / "c.lock.yaml")[2]
    assert "is a lock, not a recipe. Try: headrace serve" in cli("check", lock)[2]


def test_adapters_and_those_that_may_come_later_are_locked(cli, tmp_path):
    shelf = tmp_path / "shelf"
    for name in ("poet", "half"):
        (shelf / name).mkdir(parents=True)
        (shelf / name / "adapter_config.json").write_text("{}")
    weights = shelf / "poet" / "adapters.safetensors"
    weights.write_bytes(b"one")
    path = tmp_path / "s.lock.yaml"
    code, _, err = cli("lock", "tiny", "adapters=lora", f"adapters.shelf={shelf}", "-o", path)
    assert code == 0, err
    assert list(load_yaml(path)["artifacts"]["adapters"]) == [
        "shelf/poet/adapter_config.json", "shelf/poet/adapters.safetensors",
    ]  # fmt: skip
    weights.write_bytes(b"two")
    (shelf / "half" / "adapters.safetensors").write_bytes(b"new")
    code, _, err = cli("serve", path)
    assert code == 2 and "1 difference" in err, "what is new is served to nobody yet"
    assert "- artifacts.adapters.shelf/poet/adapters.safetensors: 3 bytes" in err
    weights.rename(shelf / "poet" / "adapter_model.safetensors")
    code, _, err = cli("serve", path)
    assert code == 2 and "2 differences" in err
    assert "- artifacts.adapters.shelf/poet/adapter_model.safetensors: nothing was locked" in err


def test_another_build_of_the_kernels_is_another_platform(cli, lock, tmp_path, monkeypatch):
    build = tmp_path / "libscipy_openblas.so"
    build.write_bytes(Path(blas.scipy_openblas()).read_bytes() + b"another build")
    monkeypatch.setattr(blas, "scipy_openblas", lambda: str(build))
    code, out, _ = cli("replay", lock)
    assert code == 2
    size = build.stat().st_size
    assert f"differs: platform.libraries.{build.name}: {size - 13:,} bytes" in out
    assert f" was locked, {size:,} bytes" in out
    assert cli("replay", lock, "--allow-drift", "platform")[0] == 0


def test_where_a_lock_is_written(cli, lock, tmp_path):
    assert "is there already" in cli("lock", "tiny", "-o", lock)[2]
    assert (
        "a lock's name ends with .lock.yaml. Try: -o x.lock.yaml"
        in cli("lock", "tiny", "-o", "x.yaml")[2]
    )
    assert "there is no folder" in cli("lock", "tiny", "-o", tmp_path / "no" / "x.lock.yaml")[2]
    code, _, err = cli("lock", "tiny", "-o", tmp_path / f"{'x' * 300}.lock.yaml")
    assert code == 2 and "cannot be written: " in err and "asking the probes" not in err
    code, _, err = cli("lock", "score", "model=fake", "-o", tmp_path / "x.lock.yaml")
    assert code == 2 and "answers nothing" in err
    code, _, err = cli("lock", "local", "model.path=/nowhere/m", "-o", tmp_path / "x.lock.yaml")
    assert code == 2 and "No such folder" in err
    assert list(tmp_path.iterdir()) == []


def test_two_locks(cli, lock, tmp_path):
    assert cli("diff", lock, lock)[:2] == (0, f"{lock} -> {lock}\nno difference\n")
    other = altered(lock, tmp_path, packages={**load_yaml(lock)["packages"], "mlx": "1.0"})
    code, out, _ = cli("diff", lock, other)
    assert code == 2
    assert "packages.mlx: " in out and "1.0 is in the other" in out
    assert "headrace diff A.lock.yaml B.lock.yaml" in cli("diff", lock)[2]
    for words in ((lock, "fake"), ("fake", lock)):
        code, _, err = cli("diff", *words)
        assert code == 2 and "fake: is no lock: a lock's name ends with .lock.yaml." in err
        assert "headrace lock fake -o fake.lock.yaml" in err
    assert (
        f"{lock.parent}: is a folder, not a lock. Locks in it: a.lock.yaml."
        in cli("diff", lock, lock.parent)[2]
    )
    assert (
        f"Name a file: {lock.parent}/model/NAME.lock.yaml"
        in cli("diff", lock, lock.parent / "model")[2]
    )


def test_two_locks_that_differ_in_nothing_but_their_answers(cli, lock, tmp_path):
    was, probes = (load_yaml(lock)["probes"] for _ in range(2))
    probes[0]["token_ids"][5] += 1
    probes[1]["token_ids"].pop()
    probes[2]["prompt"] = "Why?"
    del probes[3]
    code, out, _ = cli("diff", lock, altered(lock, tmp_path, probes=probes))
    assert code == 2
    token, ids = was[0]["token_ids"][5], was[1]["token_ids"]
    first, second, third, fourth = out.splitlines()[1:]
    assert first == f"  probes.greedy.token 5: {token} was locked, {token + 1} is in the other"
    at = len(ids) - 1
    assert second == f"  probes.drawn.token {at}: {ids[-1]} was locked, the end is in the other"
    assert third.startswith("  probes.long.prompt: ")
    assert third.endswith("… was locked, Why? is in the other")
    assert fourth.startswith("  probes.form.prompt: Describe a river as JSON. was locked, nothing")
    was[0]["logprobs"][5] -= 0.0001  # another machine rounds otherwise
    assert cli("diff", lock, altered(lock, tmp_path, probes=was))[0] == 0


def test_no_secret_enters(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("WHO", "somebody's private name")
    path = tmp_path / "s.lock.yaml"
    said = (
        "model.name=${oc.env:WHO}",
        "model.template='{{ messages }} sk-abcdefghij1234567890 ${x}'",
    )
    code, _, err = cli("lock", "tiny", *said, "-o", path)
    assert code == 0, err
    text = path.read_text()
    assert "private" not in text and "sk-abc" not in text
    model = load_yaml(path)["config"]["model"]
    assert (model["name"], model["template"]) == ("${oc.env:WHO}", HIDDEN)
    code, _, err = cli("replay", path)
    assert code == 2 and "model.template: must be set. Add model.template=VALUE" in err
    code, out, err = cli("replay", path, said[1])  # said again, it is as it was
    assert code == 0, out + err
    monkeypatch.delenv("WHO")
    assert "the environment has no WHO" in cli("replay", path, said[1])[2]


def test_what_is_taken_for_a_secret():
    sources = {"a.key": "environment ${oc.env:KEY,sk-1}", "a.place": "environment ${oc.env:P,here}"}
    found = storable(
        {"a": {"key": "sk-1", "place": "there", "api_key": "x", "max_tokens": 3, "keys": "affine"},
         "url": "https://me:pw@host/x", "list": ["hf_abcdefghijklmnop", "plain"], "none": None},
        sources,
    )  # fmt: skip
    assert found["a"] == {
        "key": "${oc.env:KEY}", "place": "${oc.env:P,here}", "api_key": HIDDEN, "max_tokens": 3, "keys": "affine",
    }  # fmt: skip
    assert (found["url"], found["list"]) == (HIDDEN, [HIDDEN, "plain"])
    own, _ = make_key()
    hidden = {"keys": own, "endpoint": "https://host/v1/traces?team=a&api-key=b"}
    assert storable(hidden, {}) == dict.fromkeys(hidden, HIDDEN)
    for _ in range(200):
        assert storable(f"told {make_key()[0]}.", {}) == HIDDEN
    secrets = (
        "sk-proj-Ab3dEf6hIj9lMn2pQr5t_x-y", "sk-ant-api03-" + "a1" * 20, "https://0123abcd@collector/v1",
        "http://me:a?b@host", "pk-abcdefghij1234567890", "?x&token=abc",
    )  # fmt: skip
    assert [storable(text, {}) for text in secrets] == [HIDDEN] * len(secrets)
    names = (
        "~/models/sk-llama-3-8b-instruct", "opus-mt-en-sk-transformer-base", "hr-mistral-7b-v0.1",
        "classla/bcms-bertic-hr-generator", "https://host/a?who=me@there", "hub/pk-qwen2-0.5b-chat",
    )  # fmt: skip
    assert [storable(text, {}) for text in names] == list(names)
    said = [
        "server.token=abc",
        "depth.max=3",
        "a.b={api-key: x}",
        "c=[d, Bearer abcdefgh]",
        "e=${oc.env:F}",
    ]
    assert typed(said) == ("server.token=???", "depth.max=3", "a.b=???", "c=???", "e=${oc.env:F}")


def test_texts_that_look_like_numbers_come_back_as_texts(tmp_path):
    value = {"a": ["1e5", "2026-11-30", "0x10", "on", "", 1e-7, 3, None, True], "b": "${x}: #"}
    (tmp_path / "x.yaml").write_text(dump_yaml(value))
    assert load_yaml(tmp_path / "x.yaml") == value
