"""From configuration to objects: what is checked, what is made once, what opens and closes when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_origin

import pytest
import toy_parts

from pipeline.build import build, pipeline_to_run
from pipeline.catalog import Catalog, first_comment, load_yaml, package_folder
from pipeline.compose import compose
from pipeline.errors import ConfigError, GraphError
from pipeline.plan import PARTS, SETTINGS, plan, resolve, source
from pipeline.signature import signature
from pipeline.types import KVPolicy, Target, Tier

CATALOG = Catalog(package_folder("conf"))
OPTIONS = [(g, name) for g in CATALOG.groups() for name in CATALOG.options(g)]
NOTED = "toy_parts.Noted"


def built(*overrides, recipe="fake", allow=("toy_parts",)):
    return build(plan(compose(recipe, overrides), allow=allow))


def refused(*overrides, recipe="fake", allow=("toy_parts",)):
    with pytest.raises(ConfigError) as caught:
        built(*overrides, recipe=recipe, allow=allow)
    return [str(problem) for problem in caught.value.problems]


# --- the options on disk


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{g}={o}" for g, o in OPTIONS])
def test_every_key_of_every_option_is_a_setting_of_its_class(group, option):
    content = load_yaml(CATALOG.options(group)[option]) or {}
    for path, node in nodes(group, content):
        takes = signature(resolve(node.pop("_target_"), ("stages", "pipeline")))
        listed = {name for name, kind in takes.parts.items() if get_origin(kind) is list}
        assert set(node) <= set(takes.settings) | listed, path
        for name, annotation in takes.parts.items():
            assert name in node or source(name, annotation), f"{path}: nobody makes {name}"


def nodes(group, content):
    """(path, node with a `_target_`) of one option file, wherever its class is named."""
    if group in SETTINGS:
        yield group, {**content, "_target_": SETTINGS[group]}
    elif group == "stage":
        for name, node in content.items():
            camel = "".join(word.capitalize() for word in name.split("_"))
            yield name, {**node, "_target_": f"stages.{name}.{camel}"}
    elif group in PARTS and "_target_" in content:
        yield group, dict(content)
    elif group == "tier":
        yield from ((key, dict(node)) for key, node in content.items())


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{g}={o}" for g, o in OPTIONS])
def test_every_option_says_what_is_gained_and_so_does_every_knob(group, option):
    path = CATALOG.options(group)[option]
    assert first_comment(path).rstrip(")").endswith(".")
    if option != "small" and (group, option) not in ALIKE:
        knobs = [x for x in path.read_text().splitlines() if ":" in x and not x.startswith("#")]
        bare = [x for x in knobs if "#" not in x and not x.endswith(":") and "_target_" not in x]
        assert [x for x in bare if not x.endswith("{}") and _key(x) not in OBVIOUS] == []


ALIKE = {
    ("sampler", "greedy"),
    ("telemetry", "quiet"),
    ("telemetry", "trace"),
}  # the option is the knob
OBVIOUS = {"kind", "blas"}


def _key(line):
    return line.split(":")[0].strip()


# --- objects


def test_a_built_pipeline_has_everything_once():
    pipeline = built()
    assert list(pipeline.parts) == list(PARTS)
    assert pipeline.phases["decode"] == ["draft", "verify", "accept", "detokenize", "commit"]
    assert list(pipeline.stages)[:2] == ["tokenize", "adapt"]
    model = pipeline.parts["model"]
    assert {id(s.target) for s in pipeline.stages.values() if hasattr(s, "target")} == {id(model)}
    assert pipeline.parts["tier"][0] is pipeline.stages["prefix_lookup"].tiers[0]
    assert pipeline.settings["server"].port == 8080
    assert pipeline.choices["model"] == "fake"


def test_parts_by_type_by_name_as_a_list_and_nested():
    part = built(
        "drafter._target_=toy_parts.TwoModels", "~drafter.max_ngram", "~drafter.min_ngram", "~drafter.growth",
        "~drafter.choice",
        "draft_model=fake", "draft_model.name=small",
        f"drafter.first={{_target_: {NOTED}, name: mine}}",
        "drafter.others={a: {_target_: stages.depth.fixed.Fixed, max: 3}}",
    ).parts["drafter"]  # fmt: skip
    target, small, tiers, first, others = part.got
    assert (target.name, small.name, [t.name for t in tiers]) == ("fake", "small", ["ram"])
    assert (first.name, [other.max for other in others]) == ("mine", [3])


def test_who_fills_a_parameter():
    assert source("target", Target) == "model"
    assert source("draft_model", Target) == "draft_model"
    assert source("kv", KVPolicy | None) == "kv"
    assert source("tiers", list[Tier]) == "tier"
    assert source("weather", dict) is None


# --- what is refused


def test_settings_of_every_kind():
    toy = f"kv._target_={NOTED}"
    assert refused(toy) == ["kv.name: must be set: wants text. Add kv.name=VALUE"]
    assert refused(toy, "kv.name=x", "kv.nam=y") == [
        "kv.nam: kv takes no 'nam'. Did you mean 'kv.name'? It takes: name, fail."
    ]
    assert refused(toy, "kv.name=x", "kv.fail=later")[0] == (
        "kv.fail: wants one of , open, close, got 'later'."
    )
    assert refused("kv.bits=4") == [
        "kv.bits: kv=native takes no 'bits'. Choose what takes it: kv=kv4, kv=kv8, kv=paged. "
        "It has no settings."
    ]
    grumpy = "kv._target_=toy_parts.Grumpy"
    assert refused(grumpy, "kv.sizes=[1,x]") == ["kv.sizes: item 1 wants a whole number, got 'x'."]
    assert refused(grumpy, "kv.size=0") == ["kv.size: wants 1 or more, got 0"]
    assert refused(grumpy, "kv.size=10") == ["kv: too big altogether"]


def test_targets_that_may_not_run():
    assert refused("kv._target_=os.system", allow=()) == [
        "kv._target_: target 'os.system' is outside of stages.*. If you trust that code: "
        "--allow-code os"
    ]
    assert (
        "'toy_parts.Noted' is outside of stages.*" in refused(f"kv._target_={NOTED}", allow=())[0]
    )
    assert "has no class 'shell'" in refused("kv._target_=toy_parts.shell")[0]
    assert "has no class 'Path'" in refused("kv._target_=stages.device.Path")[0]
    assert "cannot import stages.device.os" in refused("kv._target_=stages.device.os.system")[0]
    assert "cannot import stages.kv.nativ" in refused("kv._target_=stages.kv.nativ.Native")[0]
    assert refused("kv._target_=stages.kv.native.Natve") == [
        "kv._target_: stages.kv.native has no class 'Natve'. Did you mean 'Native'?"
    ]
    assert (
        "No module named 'toys_of_mine'. Is its folder in PYTHONPATH?"
        in (refused("kv._target_=toys_of_mine.Kv", allow=["toys_of_mine"])[0])
    )
    assert "takes no '_args_'" in refused("kv._args_=[1]")[0]


def test_a_target_inside_a_setting_is_only_data():
    text = refused("model.name={_target_: os.system, command: ls}")
    assert text[0].startswith("model.name: wants text, got {'_target_': 'os.system'")


def test_code_is_allowed_by_the_environment_but_by_no_yaml(monkeypatch):
    monkeypatch.setenv("HEADRACE_ALLOW_CODE", "other, toy_parts.")
    assert built(f"kv._target_={NOTED}", "kv.name=x", allow=()).parts["kv"].name == "x"


def test_stages_and_phases():
    assert refused("flow.decode=[draft,verfy,accept]", "flow.decde=[draft]", "flow.idle=spill") == [
        "flow.decode: no stage named 'verfy'. Did you mean 'verify'?",
        "flow.idle: wants a list of stage names.",
        "flow.decde: no such phase. Did you mean 'decode'? Phases: admit, prefill, first, decode, "
        "finish, idle.",
    ]
    assert refused("stage.drft.k=3") == ["stage.drft: no stage named 'drft'. Did you mean 'draft'?"]
    assert refused("stage.draft.k=3") == [
        "stage.draft.k: stage.draft takes no 'k'. It has no settings."
    ]


def test_a_parameter_that_nobody_fills():
    assert refused("kv._target_=toy_parts.Orphan")[0].startswith(
        "kv: wants 'weather' (settings by name), which no group makes. Groups: device, model"
    )


def test_the_graph_is_checked_and_says_what_to_choose():
    with pytest.raises(GraphError) as caught:
        built(
            "kv._target_=toy_parts.Rotating", "flow.decode=[verify,draft,accept,detokenize,commit]"
        )
    text = [str(problem) for problem in caught.value.problems]
    assert text[0].startswith(
        "stage 'verify' (decode): reads 'proposal', but it is first written by 'draft'"
    )
    assert any("needs kv to rewind" in line for line in text)
    with pytest.raises(GraphError, match="no stage drafts, so drafter=ngram would do nothing"):
        built("flow=plain")
    with pytest.raises(GraphError, match=r"so no request would ever end\. Put detokenize"):
        built("flow=plain", "drafter=none", "flow.first=[]", "flow.decode=[verify,accept]")
    with pytest.raises(GraphError, match="model: somebody has to answer"):
        built("model=none")


# --- opening and closing


@pytest.fixture
def noted(monkeypatch):
    """A pipeline whose kv, rule and tier write to a log."""
    monkeypatch.setattr(toy_parts, "LOG", [])

    def make(**fails):
        over = [
            f"{group}={{_target_: {NOTED}, name: {name}, fail: '{fails.get(name, '')}'}}"
            for group, name in (("tier.one", "one"), ("tier.two", "two"))
        ]
        over += [f"rule._target_={NOTED}", "rule.name=rule", f"rule.fail='{fails.get('rule', '')}'"]
        return built("tier=none", *over), toy_parts.LOG

    return make


def test_opening_in_order_and_closing_in_reverse(noted):
    pipeline, log = noted()
    pipeline.open()
    assert log == ["open one", "open two", "open rule"]
    pipeline.close()
    pipeline.close()
    assert log[3:] == ["close rule", "close two", "close one"]


def test_each_is_closed_even_if_another_fails(noted):
    pipeline, log = noted(rule="close", two="close")
    pipeline.open()
    with pytest.raises(RuntimeError, match="rule does not close") as caught:
        pipeline.close()
    assert log[3:] == ["close rule", "close two", "close one"]
    assert "two does not close" in caught.value.__notes__[0]


def test_what_was_open_is_closed_when_one_does_not_open(noted):
    pipeline, log = noted(two="open")
    with pytest.raises(RuntimeError, match="two does not open"):
        pipeline.open()
    assert log == ["open one", "open two", "close two", "close one"]


def test_the_device_is_open_before_mlx_is_imported():
    code = (
        "import sys, pipeline.build as b\n"
        "real = b.open_device\n"
        "def spy(spec):\n"
        "    names = {n for n in sys.modules if n.split('.')[0] in ('stages', 'mlx')}\n"
        "    print(sorted(names)); return real(spec)\n"
        "b.open_device = spy\n"
        "print(b.pipeline_to_run('fake').parts['device'].warnings)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    first, warnings = out.stdout.splitlines()
    assert first == "['stages', 'stages.blas', 'stages.device']", out.stderr
    assert "mlx was imported" not in warnings


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("model.delay_ms=-1", "model.delay_ms: wants >= 0, got -1.0"),
        ("model.layers=-1", "model.layers: wants >= 0, got -1"),
        ("model.vocab_size=100", "model.vocab_size: wants >= 258, got 100"),
        ("model.context=0", "model.context: wants >= 1, got 0"),
        ("model.seed=-1", "model.seed: wants >= 0, got -1"),
        ("tier.ram.entry_bytes=-1", "tier.ram.entry_bytes: wants >= 0, got -1"),
        ("device.threads=0", "device.threads: wants >= 1, or null for all cores but one; got 0"),
        ("sampler.seed=-1", "sampler.seed: -1 is not in [0, 2**63 - 1]"),
        (
            "draft_model=fake",
            "draft_model: no part asks for a second model, so draft_model=fake would do nothing. "
            "Choose a drafter that uses one, or leave it out.",
        ),
        ("tier=[ram,ram]", "tier: 'ram' is there twice. Leave one out."),
        (
            "tier=[disk,ram]",
            "tier: a disk stands before memory, which would never be filled. Type 'tier=[ram,disk]'.",
        ),
        (
            "server._target_=x",
            "server._target_: server takes no '_target_'. It takes: host, port, "
            "socket, keys, hosts, cors, max_connections, max_header_bytes, max_body_bytes, "
            "bodies_bytes, body_s, unread_s, max_choices, keepalive_s, shutdown_s, close_s, log, "
            "log_prompts, responses_ttl_s, responses_bytes, responses_folder, isolate, restarts, hang_s.",
        ),
        (
            "telemetry._target_=os.system",
            "telemetry._target_: telemetry takes no '_target_'. It takes: trace, recount, spans, endpoint, content.",
        ),
    ],
)
def test_settings_that_can_never_work(words, problem):
    assert refused(words) == [problem]


def test_spans_that_would_go_nowhere_and_keys_nobody_takes_are_told_before_anything_runs():
    wants = "telemetry.endpoint: wants http://host:4318/v1/traces, got "
    for said in ("nourl", "http://", "http://a:port/", "localhost:4318"):
        assert refused("telemetry=otel", f"telemetry.endpoint={said}") == [f"{wants}'{said}'"]
    url = "telemetry.endpoint=http://collector:4318/v1/traces"
    built("telemetry=otel", url, "telemetry.content=true")
    nothing = "does nothing where no spans are sent. Add telemetry=otel"
    told = [f"telemetry.endpoint: {nothing}", f"telemetry.content: {nothing}"]
    assert refused(url, "telemetry.content=true", "server.port=99999")[1:] == told


def test_a_recipes_spans_are_typed_away(tmp_path):
    path = tmp_path / "spans.yaml"
    chosen, said = (
        "override telemetry: otel, ",
        "telemetry: {content: true, endpoint: 'http://c:4318'}\n",
    )
    path.write_text(f"defaults: [base, override model: fake, {chosen}_self_]\n{said}")
    recipe = str(path)
    for typed in ("telemetry=quiet", "telemetry=trace", "telemetry.spans=false"):
        assert not built(typed, recipe=recipe).settings["telemetry"].spans
    (told,) = refused("telemetry=quiet", "telemetry.content=true", recipe=recipe)
    assert told.startswith("telemetry.content: does nothing where no spans are sent.")
    path.write_text(path.read_text().replace(chosen, ""))
    assert len(refused(recipe=recipe)) == 2


def test_files_beside_a_recipe_that_are_no_options_hide_no_problem(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [base, override model: fake, _self_]\n")
    (tmp_path / "depth").mkdir()
    for name, text in {"bad": "a: [", "number": "3", "text": "bounds", "list": "[bounds]"}.items():
        (tmp_path / "depth" / f"{name}.yaml").write_text(text)
    told = refused("depth.bounds=3", "server.port=x", recipe=str(tmp_path / "mine.yaml"))
    assert len(told) == 2
    assert told[0].startswith("depth.bounds: depth=fixed takes no 'bounds'.")
    assert "depth=text" not in told[0] and "depth=list" not in told[0]


def test_a_key_is_refused_by_its_path_and_never_by_a_class():
    """Whoever typed `server.keyss` has not heard of ServerSettings."""
    groups = [g for g in (*PARTS, *SETTINGS) if g not in ("tier", "draft_model")]
    told = refused(
        *(f"{group}.xyzzy=1" for group in groups), "tier.ram.xyzzy=1", "stage.draft.xyzzy=1"
    )
    wanted = {f"{g}.xyzzy: {g}=" for g in groups} | {
        "tier.ram.xyzzy: tier.ram ",
        "stage.draft.xyzzy: stage.draft ",
    }
    assert len(told) == len(wanted)
    assert all(any(line.startswith(start) for start in wanted) for line in told), told
    (near,) = refused("server.keyss=x")
    assert near.startswith(
        "server.keyss: server=http takes no 'keyss'. Did you mean 'server.keys'? It takes: host"
    )
    (elsewhere,) = refused("adapters.folders.sql=x")
    assert "adapters=none takes no 'folders'. Choose what takes it: adapters=lora." in elsewhere


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "model.family=lama",
            "model.family: no family named 'lama'. Did you mean 'llama'? Families: ",
        ),
        ("model.window=0", "model.window: family llama has no sliding window. Leave it out."),
        ("model.layers=0", "model.layers: wants >= 1, got 0"),
        ("model.context=0", "model.context: wants >= 1, got 0"),
    ],
)
def test_settings_that_no_family_has(words, problem):
    assert [text[: len(problem)] for text in refused(words, recipe="tiny")] == [problem]


def test_a_device_that_is_refused_before_it_runs():
    with pytest.raises(ConfigError, match=r"device\.threads: wants >= 1"):
        pipeline_to_run("fake", ["device.threads=0"])


def test_all_settings_of_a_part_that_are_out_of_range_are_told_at_once():
    wrong = ["drafter=suffix", "drafter.min_match=0", "drafter.growth=0", "drafter.remember=3"]
    wrong += ["depth=adaptive", "depth.max=-1", "depth.margin=-1", "depth.probe=0"]
    with pytest.raises(ConfigError) as caught:
        build(plan(compose("fake", wrong)))
    assert {problem.where for problem in caught.value.problems} == {
        "drafter.min_match", "drafter.growth", "drafter.remember", "depth.max", "depth.margin", "depth.probe",
    }  # fmt: skip
